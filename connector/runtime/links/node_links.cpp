#include "connector/runtime/links/node_links.h"

#include <utility>

#include "connector/runtime/links/directory_link.h"
#include "connector/runtime/links/lease_links.h"
#include "connector/runtime/links/push_links.h"
#include "connector/runtime/poll_loop.h"
#include "transport/base/log.h"

namespace kvferry {
namespace {

constexpr TimeNs kTick = 50 * kMillisecond;
// How long actions for the controller may wait: while the engine has requests, and otherwise.
constexpr int kBusyWaitMs = 2, kIdleWaitMs = 20;

template <class Answer>
Answer refusal(const Error& why) {
  Answer answer;
  answer.reply.refused = why.what;
  return answer;
}

}  // namespace

struct NodeLinks::Impl {
  Impl(SharedCore& core, std::unique_ptr<controller::Client> client, std::unique_ptr<ServerSocket> socket)
      : shared(core),
        server(std::move(socket)),
        parts{[this](const auto& event) { with_core(event); }, peers, *server, workers, ranks, clock},
        directory(std::move(client), parts.with_core, clock) {}

  int turn(std::vector<pollfd>& fds);
  void execute(Action action);
  bool take_requests();
  void refuse(const Asker& asker, std::uint32_t type, const Error& why);
  bool take_answers();
  bool take_outcomes();
  /// Whether a part of a handed-over prompt will be in the pool in a moment.
  bool is_being_saved(const SchedulerCore& core, const LeaseRequest& request) const;
  void with_core(const std::function<void(SchedulerCore&)>& event) {
    const std::lock_guard lock(shared.mutex);
    event(*shared.core);
    for (Action& action : shared.core->take_actions()) queue.push_back(std::move(action));
    shared.changed.notify_all();
  }

  SharedCore& shared;
  SteadyClock clock;
  std::unique_ptr<ServerSocket> server;                // receives the requests of other nodes
  PeerLinks peers{clock};                              // sends requests to other nodes
  std::vector<std::unique_ptr<ClientSocket>> workers;  // [rank]
  std::vector<RankEndpoint> ranks;                     // [rank]
  LinkParts parts;
  DirectoryLink directory;
  std::optional<LeaseLinks> leases;  // empty until start() knows the workers
  std::optional<PushLinks> pushes;   // empty until start() knows the workers
  TimeNs next_tick = 0;
  std::vector<Action> queue;  // guarded by shared.mutex
  PollLoop loop;
};

NodeLinks::NodeLinks(SharedCore& shared, std::unique_ptr<controller::Client> directory,
                     std::unique_ptr<ServerSocket> server)
    : impl_(std::make_unique<Impl>(shared, std::move(directory), std::move(server))) {}
NodeLinks::~NodeLinks() { shutdown(); }

Result<void> NodeLinks::start(const std::vector<WorkerHello>& workers) {
  for (const WorkerHello& worker : workers) {
    auto link = ClientSocket::connect(worker.link_endpoint);
    if (!link) return std::move(link).error();
    impl_->workers.push_back(std::move(*link));
    impl_->ranks.push_back(worker.endpoint);
  }
  impl_->leases.emplace(impl_->parts, [impl = impl_.get()](const SchedulerCore& core, const LeaseRequest& request) {
    return impl->is_being_saved(core, request);
  });
  impl_->pushes.emplace(impl_->parts);
  impl_->loop.start([impl = impl_.get()](std::vector<pollfd>& fds) { return impl->turn(fds); });
  return {};
}

bool NodeLinks::enqueue(std::vector<Action> actions) {
  bool is_urgent = false;
  for (Action& action : actions) {
    is_urgent |= std::holds_alternative<QueryDirectory>(action) || std::holds_alternative<RequestLease>(action) ||
                 std::holds_alternative<StartPull>(action) || std::holds_alternative<OfferPush>(action) ||
                 std::holds_alternative<StartPush>(action) || std::holds_alternative<SettlePush>(action);
    impl_->queue.push_back(std::move(action));
  }
  return is_urgent;
}

void NodeLinks::wake() { impl_->loop.wake(); }

void NodeLinks::shutdown() {
  impl_->loop.stop();
  impl_->directory.leave();
}

int NodeLinks::Impl::turn(std::vector<pollfd>& fds) {
  std::vector<Action> actions;
  {
    const std::lock_guard lock(shared.mutex);
    actions.swap(queue);
  }
  bool busy = !actions.empty();
  for (Action& action : actions) execute(std::move(action));
  busy |= take_requests();
  busy |= leases->progress();
  busy |= take_answers();
  busy |= take_outcomes();
  directory.take_events();
  if (const TimeNs now = clock.now(); now >= next_tick) {
    with_core([&](SchedulerCore& core) { core.tick(now); });
    peers.drop_idle();
    next_tick = now + kTick;
  }
  if (busy) return 0;
  fds.push_back({directory.fd(), POLLIN, 0});
  fds.push_back({server->fd(), POLLIN, 0});
  for (const auto& worker : workers) fds.push_back({worker->fd(), POLLIN, 0});
  peers.add_to(fds);
  const std::lock_guard lock(shared.mutex);
  if (!queue.empty()) return 0;
  const std::size_t num_requests = shared.core->num_requests();
  directory.set_load(num_requests);
  return leases->is_waiting() ? 1 : num_requests > 0 ? kBusyWaitMs : kIdleWaitMs;
}

void NodeLinks::Impl::execute(Action action) {
  std::visit(
      Overloaded{
          [&](QueryDirectory& query) { directory.execute(query); },
          [&](PublishChunks& published) { directory.execute(published); },
          [&](AnnounceEvictions& evicted) { directory.execute(evicted); },
          [&](RequestLease& wanted) { leases->execute(wanted); },
          [&](ReleaseLease& wanted) { leases->execute(wanted); },
          [&](StartPull& wanted) { leases->execute(wanted); },
          [&](OfferPush& wanted) { pushes->execute(wanted); },
          [&](StartPush& wanted) { pushes->execute(wanted); },
          [&](SettlePush& wanted) { pushes->execute(wanted); },
          [&](DropPush& wanted) { pushes->execute(wanted); },
          [&](GrantSlots& wanted) { pushes->execute(wanted); },
          [&](RevokeSlots& wanted) { pushes->execute(wanted); },
          [&](LogLine& line) { log().log(line.warning ? spdlog::level::warn : spdlog::level::info, "{}", line.text); },
      },
      action);
}

bool NodeLinks::Impl::take_requests() {
  bool busy = false;
  while (auto message = server->receive()) {
    busy = true;
    const Result<Envelope> envelope = decode<Envelope>(message->bytes, "peer message");
    if (!envelope) continue;
    Asker asker{std::move(message->sender), envelope->id, envelope->version};
    const Result<void> is_readable = peers.versions().check("the node that asks", *envelope);
    Result<PeerRequest> request = is_readable ? unseal<PeerRequest>(*envelope) : is_readable.error();
    if (!request) {
      refuse(asker, envelope->type, request.error());
      continue;
    }
    std::visit(Overloaded{
                   [&](LeaseRequest& lease) { leases->requested(std::move(asker), std::move(lease)); },
                   [&](LeaseRelease& lease) { leases->released(lease); },
                   [&](PushOffer& offer) { pushes->offered(std::move(asker), offer); },
                   [&](PushSettlement& settlement) { pushes->settled(settlement); },
               },
               *request);
  }
  return busy;
}

/// Answers a request that can't be read, so that the asker does not wait until its deadline.
void NodeLinks::Impl::refuse(const Asker& asker, std::uint32_t type, const Error& why) {
  if (type == kMessageType<LeaseRequest>) parts.answer(asker, refusal<LeaseAnswer>(why));
  if (type == kMessageType<PushOffer>) parts.answer(asker, refusal<PushAnswer>(why));
}

bool NodeLinks::Impl::take_answers() {
  bool busy = false;
  while (const auto received = peers.receive()) {
    busy = true;
    const std::string& endpoint = received->endpoint;
    const Result<Envelope> envelope = decode<Envelope>(received->bytes, "peer message");
    if (!envelope) continue;
    const Result<void> is_readable = peers.versions().learn(endpoint, *envelope);
    Result<PeerAnswer> answer = is_readable ? unseal<PeerAnswer>(*envelope) : is_readable.error();
    if (!answer && envelope->type == kMessageType<LeaseAnswer>)
      answer = PeerAnswer(refusal<LeaseAnswer>(answer.error()));
    if (!answer && envelope->type == kMessageType<PushAnswer>) answer = PeerAnswer(refusal<PushAnswer>(answer.error()));
    if (!answer) continue;
    std::visit(Overloaded{
                   [&](LeaseAnswer& lease) { leases->answered(endpoint, envelope->id, std::move(lease)); },
                   [&](PushAnswer& push) { pushes->answered(endpoint, envelope->id, std::move(push)); },
               },
               *answer);
  }
  return busy;
}

bool NodeLinks::Impl::take_outcomes() {
  bool busy = false;
  for (const auto& worker : workers) {
    while (auto bytes = worker->receive()) {
      busy = true;
      const Result<Envelope> envelope = decode<Envelope>(*bytes, "worker message");
      Result<WorkerOutcome> outcome = envelope ? unseal<WorkerOutcome>(*envelope) : envelope.error();
      if (!outcome) {
        log().error("ignoring a message from a worker: {}", outcome.error().what);
        continue;
      }
      std::visit(Overloaded{
                     [&](const PullOutcome& pull) { leases->pulled(pull); },
                     [&](const ChecksumOutcome& checksums) { leases->hashed(checksums); },
                     [&](const PushOutcome& push) { pushes->ended(push); },
                     [&](const GrantOutcome& grants) { pushes->granted(grants); },
                     [&](const Revoked& slots) { pushes->revoked(slots); },
                 },
                 *outcome);
    }
  }
  return busy;
}

bool NodeLinks::Impl::is_being_saved(const SchedulerCore& core, const LeaseRequest& request) const {
  if (request.handoff_request.empty()) return false;
  for (const ChunkKey& key : request.keys) {
    const ChunkPool::Slot* const slot = core.pool().find(key);
    if (slot != nullptr && shared.saves.contains(slot->ref)) return true;
  }
  return false;
}

}  // namespace kvferry
