#include "connector/runtime/links/node_links.h"

#include <utility>

#include "transport/base/log.h"
#include "transport/base/printable.h"
#include "transport/base/wall_clock.h"

namespace kvferry {
namespace {

constexpr TimeNs kTick = 50 * kMillisecond, kReportEvery = kSecond;
// Longest time between two turns. Each turn takes time from a model that computes on the same core.
constexpr int kTurnEveryMs = 20;
// Longest time that actions that are not urgent wait. For kOftenFor after actions, as while many requests decode, the
// thread looks so often whether there are more, which is no turn; later it sleeps until it is woken.
constexpr int kLookEveryMs = 3;
constexpr TimeNs kOftenFor = 200 * kMillisecond;
// Limit on the requests of other nodes that a turn of the thread takes, and on their answers. Without it, peers that
// send without a break would keep the thread from deadlines, workers and the controller.
constexpr int kMessagesPerTurn = 256;

template <class Answer>
Answer refusal(const Error& why) {
  Answer answer;
  answer.reply.refused = why.what;
  return answer;
}

}  // namespace

NodeLinks::NodeLinks(SharedCore& shared, std::unique_ptr<controller::Client> directory,
                     std::unique_ptr<ServerSocket> server)
    : shared_(shared),
      server_(std::move(server)),
      parts_{[this](const LinkParts::Event& event) { with_core(event); },
             peers_,
             *server_,
             workers_,
             ranks_,
             shared.saves,
             shared.weights_epoch,
             clock_},
      directory_(parts_, std::move(directory)) {}

Result<void> NodeLinks::start(const std::vector<WorkerHello>& workers) {
  for (const WorkerHello& worker : workers) {
    workers_.push_back(KVFERRY_TRY(ClientSocket::connect(worker.link_endpoint, {}, /*is_own=*/true)));
    ranks_.push_back(worker.endpoint);
  }
  leases_.emplace(parts_);
  loop_.start([this](std::vector<pollfd>& fds) { return turn(fds); }, [this] { return is_turn_due(); });
  return {};
}

void NodeLinks::with_core(const LinkParts::Event& event) {
  const std::lock_guard lock(shared_.mutex);
  event(*shared_.core, clock_.now());
  for (Action& action : shared_.core->take_actions()) queue_.push_back(std::move(action));
  shared_.changed.notify_all();
}

bool NodeLinks::enqueue(std::vector<Action> actions) {
  bool is_urgent = !actions.empty() && std::exchange(sleeps_long_, false);
  for (Action& action : actions) {
    is_urgent |= std::holds_alternative<QueryDirectory>(action) || std::holds_alternative<RequestLease>(action) ||
                 std::holds_alternative<StartPull>(action) || std::holds_alternative<OfferPush>(action) ||
                 std::holds_alternative<StartPush>(action) || std::holds_alternative<SettlePush>(action);
    queue_.push_back(std::move(action));
  }
  return is_urgent;
}

void NodeLinks::shutdown() {
  loop_.stop();
  directory_.leave();
}

bool NodeLinks::is_turn_due() {
  if (leases_->is_waiting() || clock_.now() - turned_at_ >= kTurnEveryMs * kMillisecond) return true;
  const std::lock_guard lock(shared_.mutex);
  return !queue_.empty();
}

int NodeLinks::turn(std::vector<pollfd>& fds) {
  std::vector<Action> actions;
  {
    const std::lock_guard lock(shared_.mutex);
    actions.swap(queue_);
    sleeps_long_ = false;
  }
  turned_at_ = clock_.now();
  bool busy = !actions.empty();
  if (busy) last_actions_ = turned_at_;
  for (Action& action : actions) execute(std::move(action));
  busy |= take_requests();
  busy |= leases_->progress();
  busy |= take_answers();
  busy |= take_outcomes();
  directory_.take_events();
  if (const TimeNs now = clock_.now(); now >= next_tick_) {
    with_core([](SchedulerCore& core, TimeNs at) { core.tick(at); });
    peers_.drop_idle();
    next_tick_ = now + kTick;
    if (now >= next_report_) {
      directory_.report();
      next_report_ = now + kReportEvery;
    }
  }
  if (busy) return 0;
  fds.push_back({directory_.fd(), POLLIN, 0});
  fds.push_back({server_->fd(), POLLIN, 0});
  for (const auto& worker : workers_) fds.push_back({worker->fd(), POLLIN, 0});
  peers_.add_to(fds);
  const std::lock_guard lock(shared_.mutex);
  if (!queue_.empty()) return 0;
  directory_.set_load(shared_.core->num_requests());
  if (leases_->is_waiting()) return 1;
  sleeps_long_ = turned_at_ - last_actions_ >= kOftenFor;
  return sleeps_long_ ? kTurnEveryMs : kLookEveryMs;
}

void NodeLinks::execute(Action action) {
  const auto carry_out = [this]<class Wanted>(Wanted& wanted) {
    if constexpr (std::is_same_v<Wanted, LogLine>)
      log().log(wanted.warning ? spdlog::level::warn : spdlog::level::info, "{}", wanted.text);
    else if constexpr (requires { directory_.execute(wanted); })
      directory_.execute(wanted);
    else if constexpr (requires { leases_->execute(wanted); })
      leases_->execute(wanted);
    else
      pushes_.execute(wanted);
  };
  std::visit(carry_out, action);
}

bool NodeLinks::take_requests() {
  bool busy = false;
  for (int left = kMessagesPerTurn; left > 0; --left) {
    auto message = server_->receive();
    if (!message) break;
    busy = true;
    const Result<Envelope> envelope = decode<Envelope>(message->bytes, "peer message");
    if (!envelope) continue;
    Asker asker{std::move(message->sender), envelope->id, envelope->version, std::move(message->member),
                std::move(message->curve_key)};
    const Result<void> is_readable = peers_.versions().check("the node that asks", *envelope);
    Result<PeerRequest> request = is_readable ? unseal<PeerRequest>(*envelope) : is_readable.error();
    if (!request) {
      refuse(asker, envelope->type, request.error());
      continue;
    }
    std::visit(Overloaded{
                   [&](LeaseRequest& lease) { leases_->requested(std::move(asker), std::move(lease)); },
                   [&](LeaseRelease& lease) { leases_->released(lease); },
                   [&](PushOffer& offer) { pushes_.offered(std::move(asker), std::move(offer)); },
                   [&](PushSettlement& settlement) { pushes_.settled(settlement); },
                   [&](const PushProgress& progress) { pushes_.progressed(progress); },
                   [&](const LivesRequest& asked) { tell_lives(asker, asked); },
               },
               *request);
  }
  return busy;
}

void NodeLinks::tell_lives(const Asker& asker, const LivesRequest& asked) {
  LivesAnswer answer;
  with_core([&](SchedulerCore& core, TimeNs now) {
    const FlightRecorder& recorder = core.recorder();
    answer.lives = asked.num_slowest > 0  ? recorder.slowest(asked.num_slowest, now)
                   : asked.num_newest > 0 ? recorder.newest(asked.num_newest, now)
                   : !asked.trace.empty() ? recorder.find_trace(asked.trace, now)
                                          : recorder.find(asked.request, now);
  });
  answer.unix_ms = wall_clock_ms();
  parts_.answer(asker, answer);
}

/// Answers a lease request or push offer that can't be read, so that the asker does not wait until its deadline.
void NodeLinks::refuse(const Asker& asker, std::uint32_t type, const Error& why) {
  if (type == kMessageType<LeaseRequest>) parts_.answer(asker, refusal<LeaseAnswer>(why));
  if (type == kMessageType<PushOffer>) parts_.answer(asker, refusal<PushAnswer>(why));
}

bool NodeLinks::take_answers() {
  bool busy = false;
  for (int left = kMessagesPerTurn; left > 0; --left) {
    const auto received = peers_.receive();
    if (!received) break;
    busy = true;
    const std::string& endpoint = received->endpoint;
    const Result<Envelope> envelope = decode<Envelope>(received->bytes, "peer message");
    if (!envelope) continue;
    const Result<void> is_readable = peers_.versions().learn(endpoint, *envelope);
    Result<PeerAnswer> answer = is_readable ? unseal<PeerAnswer>(*envelope) : is_readable.error();
    if (!answer && envelope->type == kMessageType<LeaseAnswer>)
      answer = PeerAnswer(refusal<LeaseAnswer>(answer.error()));
    if (!answer && envelope->type == kMessageType<PushAnswer>) answer = PeerAnswer(refusal<PushAnswer>(answer.error()));
    if (!answer) continue;
    std::visit(Overloaded{
                   [&](LeaseAnswer& lease) {
                     lease.reply.refused = printable(lease.reply.refused, kPeerTextMax);
                     leases_->answered(endpoint, envelope->id, std::move(lease));
                   },
                   [&](PushAnswer& push) {
                     push.reply.refused = printable(push.reply.refused, kPeerTextMax);
                     pushes_.answered(endpoint, envelope->id, std::move(push));
                   },
                   [](LivesAnswer&) {},  // ignored: this node never sends a LivesRequest
               },
               *answer);
  }
  return busy;
}

bool NodeLinks::take_outcomes() {
  bool busy = false;
  for (const auto& worker : workers_) {
    while (auto bytes = worker->receive()) {
      busy = true;
      const Result<Envelope> envelope = decode<Envelope>(*bytes, "worker message");
      Result<WorkerOutcome> outcome = envelope ? unseal<WorkerOutcome>(*envelope) : envelope.error();
      if (!outcome) {
        log().error("a message of one of this server's workers is ignored: {}", outcome.error().what);
        continue;
      }
      std::visit(Overloaded{
                     [&](const PullOutcome& pull) { leases_->pulled(pull); },
                     [&](const ChecksumOutcome& checksums) { leases_->hashed(checksums); },
                     [&](const PushOutcome& push) { pushes_.ended(push); },
                     [&](const GrantOutcome& grants) { pushes_.granted(grants); },
                     [&](const Revoked& slots) { pushes_.revoked(slots); },
                     [&](const FramePinOutcome& frames) { leases_->pinned(frames); },
                     [&](const SlotsWritten& slots) { leases_->slots_written(slots); },
                     [&](const LayersSaved& saved) { pushes_.layers_saved(saved); },
                 },
                 *outcome);
    }
  }
  return busy;
}

}  // namespace kvferry
