#include "connector/runtime/links/node_links.h"

#include <poll.h>

#include <atomic>
#include <thread>
#include <utility>

#include "connector/runtime/links/directory_link.h"
#include "connector/runtime/links/peer_links.h"
#include "connector/runtime/links/push_links.h"
#include "connector/runtime/worker/shapes.h"
#include "transport/base/log.h"
#include "transport/event_fd.h"

namespace kvferry {
namespace {

template <class... Handlers>
struct Overloaded : Handlers... {
  using Handlers::operator()...;
};
template <class... Handlers>
Overloaded(Handlers...) -> Overloaded<Handlers...>;  // clang 14 doesn't deduce aggregates

constexpr int kTickMs = 50;
// How long news for the controller may lie, while requests are served and else.
constexpr int kNewsMs = 2, kIdleNewsMs = 20;
// A prompt is handed over when its last step is done; its last chunks may be on their way from the GPU then.
constexpr TimeNs kSavePatience = 200 * kMillisecond;
// Workers hash for readers of another shape, who give up after a second.
constexpr TimeNs kHashPatience = 600 * kMillisecond;

}  // namespace

struct NodeLinks::Impl {
  Impl(SharedCore& core, std::unique_ptr<controller::Client> client, std::unique_ptr<ServerSocket> server)
      : shared(core),
        directory(
            std::move(client), [this](const auto& event) { tell_core(event); }, clock),
        peers(std::move(server)),
        pushes(push_parts()) {}

  void run();
  PushLinksParts push_parts();
  void execute(Action action);
  void send_lease(RequestLease wanted);
  void send_pull(StartPull wanted);
  bool take_peer_requests();
  void answer_peers();
  bool is_being_saved(const LeaseRequest& request) const;
  bool answer_other_shapes();
  bool take_peer_answers();
  bool take_worker_outcomes();
  /// Calls the core under its lock and queues what it wants done.
  template <class Event>
  void tell_core(Event event) {
    const std::lock_guard lock(shared.mutex);
    event(*shared.core);
    for (Action& action : shared.core->take_actions()) queue.push_back(std::move(action));
    shared.changed.notify_all();
  }

  SharedCore& shared;
  SteadyClock clock;
  DirectoryLink directory;
  std::unique_ptr<ServerSocket> peers;
  std::vector<RankEndpoint> ranks;
  std::vector<Shard> shards;                           // [rank]
  std::vector<std::unique_ptr<ClientSocket>> workers;  // [rank]
  PeerLinks links{clock};
  std::optional<RunChecksums> run_checksums;  // once the workers are known
  struct Asked {
    std::string sender;
    std::uint64_t id = 0;
    std::uint32_t version = 0;  // that it asks in, and is answered in
    LeaseRequest request;
    TimeNs deadline = 0;  // then it is answered with what there is
  };
  std::vector<Asked> asked;
  PushLinks pushes;
  std::vector<Action> queue;  // guarded by shared.mutex
  EventFd wake;
  std::atomic<bool> stopping{false};
  std::thread thread;
};

NodeLinks::NodeLinks(SharedCore& shared, std::unique_ptr<controller::Client> directory,
                     std::unique_ptr<ServerSocket> peers)
    : impl_(std::make_unique<Impl>(shared, std::move(directory), std::move(peers))) {}
NodeLinks::~NodeLinks() { shutdown(); }

Result<void> NodeLinks::start(const std::vector<WorkerHello>& workers) {
  for (const WorkerHello& worker : workers) {
    auto link = ClientSocket::connect(worker.link_endpoint);
    if (!link) return std::move(link).error();
    impl_->workers.push_back(std::move(*link));
    impl_->ranks.push_back(worker.endpoint);
    impl_->shards.push_back(worker.endpoint.shard);
  }
  impl_->run_checksums.emplace(impl_->shards);
  impl_->thread = std::thread([impl = impl_.get()] { impl->run(); });
  return {};
}

bool NodeLinks::leave(std::vector<Action> actions) {
  bool is_urgent = false;
  for (Action& action : actions) {
    is_urgent |= std::holds_alternative<QueryDirectory>(action) || std::holds_alternative<RequestLease>(action) ||
                 std::holds_alternative<StartPull>(action) || std::holds_alternative<OfferPush>(action) ||
                 std::holds_alternative<StartPush>(action) || std::holds_alternative<SettlePush>(action);
    impl_->queue.push_back(std::move(action));
  }
  return is_urgent;
}

void NodeLinks::wake() { impl_->wake.set(); }

void NodeLinks::shutdown() {
  if (impl_->thread.joinable()) {
    impl_->stopping = true;
    impl_->wake.set();
    impl_->thread.join();
  }
  impl_->directory.leave();
}

void NodeLinks::Impl::run() {
  TimeNs next_tick = 0;
  while (!stopping) {
    wake.clear();
    std::vector<Action> actions;
    {
      const std::lock_guard lock(shared.mutex);
      actions.swap(queue);
    }
    bool busy = !actions.empty();
    for (Action& action : actions) execute(std::move(action));
    busy |= take_peer_requests();
    answer_peers();
    busy |= answer_other_shapes();
    busy |= take_peer_answers();
    busy |= take_worker_outcomes();
    directory.take_events();
    if (const TimeNs now = clock.now(); now >= next_tick) {
      tell_core([&](SchedulerCore& core) { core.tick(now); });
      links.forget_idle();
      next_tick = now + kTickMs * kMillisecond;
    }
    if (busy) continue;
    std::vector<pollfd> fds = {{wake.fd(), POLLIN, 0}, {directory.fd(), POLLIN, 0}, {peers->fd(), POLLIN, 0}};
    for (const auto& worker : workers) fds.push_back({worker->fd(), POLLIN, 0});
    links.add_to(fds);
    int patience_ms = kIdleNewsMs;
    {
      const std::lock_guard lock(shared.mutex);
      if (!queue.empty()) continue;
      const std::size_t load = shared.core ? shared.core->num_requests() : 0;
      if (load > 0) patience_ms = kNewsMs;
      directory.set_load(load);
    }
    if (!asked.empty()) patience_ms = 1;
    ::poll(fds.data(), fds.size(), patience_ms);
  }
}

void NodeLinks::Impl::execute(Action action) {
  std::visit(
      Overloaded{
          [&](QueryDirectory& query) { directory.execute(query); },
          [&](RequestLease& wanted) { send_lease(std::move(wanted)); },
          [&](ReleaseLease& released) {
            links.send(released.endpoint,
                       seal(NodeMessage::kLeaseRelease, 0, released.lease, links.version_with(released.endpoint)));
          },
          [&](StartPull& wanted) { send_pull(std::move(wanted)); },
          [&](PublishChunks& published) { directory.execute(published); },
          [&](OfferPush& offered) { pushes.execute(offered); },
          [&](StartPush& started) { pushes.execute(started); },
          [&](SettlePush& settled) { pushes.execute(settled); },
          [&](DropPush& dropped) { pushes.execute(dropped); },
          [&](GrantSlots& lent) { pushes.execute(lent); },
          [&](RevokeSlots& reclaimed) { pushes.execute(reclaimed); },
          [&](AnnounceEvictions& evicted) { directory.execute(evicted); },
          [&](LogLine& line) { log().log(line.warning ? spdlog::level::warn : spdlog::level::info, "{}", line.text); },
      },
      action);
}

PushLinksParts NodeLinks::Impl::push_parts() {
  return {[this](const std::function<void(SchedulerCore&)>& event) { tell_core(event); },
          [this](const std::string& endpoint, const std::string& bytes) { return links.send(endpoint, bytes); },
          [this](const std::string& sender, const std::string& bytes) { return peers->send(sender, bytes); },
          [this](const std::string& endpoint) { return links.version_with(endpoint); },
          [this](std::uint32_t rank, const std::string& bytes) { return workers[rank]->send(bytes); },
          ranks,
          clock};
}

void NodeLinks::Impl::send_lease(RequestLease wanted) {
  wanted.request.shards = shards;
  const std::uint32_t version = links.version_with(wanted.endpoint);
  if (links.send(wanted.endpoint, seal(NodeMessage::kLeaseRequest, wanted.fetch, wanted.request, version))) return;
  // Nobody to ask there: the same as a holder that has nothing.
  tell_core([&](SchedulerCore& core) { core.lease_answered(wanted.fetch, wanted.endpoint, {}, clock.now()); });
}

void NodeLinks::Impl::send_pull(StartPull wanted) {
  const PeerLinks::Ranks& remote = links.ranks_of(wanted.endpoint);
  for (std::uint32_t rank = 0; rank < workers.size(); ++rank) {
    const bool is_sent = !remote.all.empty() &&  // else it was forgotten since it answered
                         workers[rank]->send(seal(NodeMessage::kPullOrder, wanted.pull,
                                                  order_for(rank, wanted, ranks, remote.all, remote.map, clock.now())));
    if (is_sent) continue;
    const std::vector<bool> none(wanted.items.size(), false);
    tell_core([&](SchedulerCore& core) { core.pull_done(wanted.pull, rank, none, clock.now()); });
  }
}

bool NodeLinks::Impl::take_peer_requests() {
  bool busy = false;
  while (auto message = peers->receive()) {
    busy = true;
    const Result<Envelope> envelope = decode<Envelope>(message->bytes, "peer message");
    if (!envelope) continue;
    LeaseAnswer answer;
    if (const Result<void> readable = links.versions().check("the node that asks", *envelope); !readable) {
      answer.reply.refused = readable.error().what;
    } else if (envelope->type == static_cast<std::uint32_t>(NodeMessage::kLeaseRelease)) {
      if (const auto lease = decode<std::uint64_t>(envelope->body, "lease release"))
        tell_core([&](SchedulerCore& core) { core.lease_released(*lease); });
      continue;
    } else if (envelope->type == static_cast<std::uint32_t>(NodeMessage::kLeaseRequest)) {
      Result<LeaseRequest> request = decode<LeaseRequest>(envelope->body, "lease request");
      if (request)
        asked.push_back(
            {message->sender, envelope->id, envelope->version, std::move(*request), clock.now() + kSavePatience});
      continue;
    } else {
      pushes.take_request(message->sender, *envelope);
      continue;
    }
    peers->send(message->sender, seal(NodeMessage::kLeaseAnswer, envelope->id, answer, envelope->version));
  }
  return busy;
}

void NodeLinks::Impl::answer_peers() {
  for (Asked& one : std::exchange(asked, {})) {
    LeaseAnswer answer;
    answer.ranks = ranks;
    bool is_too_early = false;
    const bool has_other_shape = run_checksums->is_needed(one.request);
    if (const Result<void> fits = run_checksums->check(one.request); !fits) {
      answer.reply.refused = fits.error().what;
      peers->send(one.sender, seal(NodeMessage::kLeaseAnswer, one.id, answer, one.version));
      continue;
    }
    tell_core([&](SchedulerCore& core) {
      const TimeNs now = clock.now();
      is_too_early = now < one.deadline && is_being_saved(one.request);
      if (!is_too_early) answer.reply = core.lease_requested("a node's fetch " + std::to_string(one.id), one.request, now);
    });
    if (is_too_early) {
      asked.push_back(std::move(one));
    } else if (has_other_shape) {
      for (const auto& [rank, order] : run_checksums->begin(one.sender, one.id, one.version, one.request,
                                                            std::move(answer), clock.now(), kHashPatience))
        workers[rank]->send(seal(NodeMessage::kChecksumOrder, order.order, order));
    } else {
      peers->send(one.sender, seal(NodeMessage::kLeaseAnswer, one.id, answer, one.version));
    }
  }
}

bool NodeLinks::Impl::answer_other_shapes() {
  const std::vector<RunChecksums::Ready> all = run_checksums->take_ready(clock.now());
  for (const RunChecksums::Ready& ready : all) {
    if (!ready.damaged.empty() || ready.num_late > 0)
      log().warn(
          "not leased to a node of another shape: {} damaged chunks, which are forgotten, and {} that were not "
          "hashed in time",
          ready.damaged.size(), ready.num_late);
    if (!ready.damaged.empty()) tell_core([&](SchedulerCore& core) { core.evict_ordered(ready.damaged); });
    peers->send(ready.sender, seal(NodeMessage::kLeaseAnswer, ready.id, ready.answer, ready.version));
  }
  return !all.empty();
}

/// Whether a part of a handed-over prompt will be here in a moment.
bool NodeLinks::Impl::is_being_saved(const LeaseRequest& request) const {
  if (request.handoff_request.empty()) return false;
  for (const ChunkKey& key : request.keys) {
    const ChunkPool::Slot* const slot = shared.core->pool().find(key);
    if (slot != nullptr && shared.saves.contains(slot->ref)) return true;
  }
  return false;
}

bool NodeLinks::Impl::take_peer_answers() {
  bool busy = false;
  while (const auto received = links.receive()) {
    busy = true;
    const std::string& endpoint = received->endpoint;
    const Result<Envelope> envelope = decode<Envelope>(received->bytes, "peer message");
    if (!envelope || pushes.take_answer(endpoint, *envelope)) continue;
    if (envelope->type != static_cast<std::uint32_t>(NodeMessage::kLeaseAnswer)) continue;
    const Result<void> readable = links.versions().learn(endpoint, *envelope);
    Result<LeaseAnswer> answer = decode<LeaseAnswer>(envelope->body, "lease answer");
    if (!readable) {
      answer = LeaseAnswer{};
      answer->reply.refused = readable.error().what;
    }
    if (!answer) continue;
    Result<ShardMap> map = fit_answer(ranks, *answer);
    if (map) {
      links.set_ranks(endpoint, {std::move(answer->ranks), std::move(*map)});
    } else {
      if (answer->reply.refused.empty()) answer->reply.refused = map.error().what;
      answer->reply.chunks.clear();
    }
    tell_core([&](SchedulerCore& core) { core.lease_answered(envelope->id, endpoint, answer->reply, clock.now()); });
  }
  return busy;
}

bool NodeLinks::Impl::take_worker_outcomes() {
  bool busy = false;
  for (const auto& worker : workers) {
    while (auto bytes = worker->receive()) {
      busy = true;
      const Result<Envelope> envelope = decode<Envelope>(*bytes, "worker message");
      if (envelope && envelope->type == static_cast<std::uint32_t>(NodeMessage::kChecksumOutcome)) {
        if (const auto outcome = decode<ChecksumOutcome>(envelope->body, "checksums")) run_checksums->take(*outcome);
      }
      if (!envelope || pushes.take_outcome(*envelope)) continue;
      if (envelope->type != static_cast<std::uint32_t>(NodeMessage::kPullOutcome)) continue;
      const Result<PullOutcome> outcome = decode<PullOutcome>(envelope->body, "pull outcome");
      if (!outcome) continue;
      tell_core([&](SchedulerCore& core) {
        core.pull_done(outcome->pull, outcome->rank, outcome->ok, clock.now(), outcome->checksums);
      });
    }
  }
  return busy;
}

}  // namespace kvferry
