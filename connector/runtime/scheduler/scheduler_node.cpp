#include "connector/runtime/scheduler/scheduler_node.h"

#include <chrono>
#include <random>
#include <utility>

#include "connector/runtime/links/node_links.h"
#include "connector/runtime/net_address.h"
#include "transport/base/check.h"
#include "transport/base/log.h"
#include "transport/base/net/host_port.h"

namespace kvferry {
namespace {

constexpr std::chrono::milliseconds kLookupPatience{2};  // how long lookups may wait for answers, per step
constexpr TimeNs kMetricsInterval = 100 * kMillisecond;

std::map<std::string, double> metrics_of(const SchedulerCore& core) {
  const CoreCounters& c = core.counters();
  const auto number = [](auto value) { return static_cast<double>(value); };
  return std::map<std::string, double>{
      {"lookups_total", number(c.lookups)},
      {"lookup_hits_total", number(c.lookup_hits)},
      {"hit_tokens_total", number(c.hit_tokens)},
      {"loads_total", number(c.loads)},
      {"loaded_tokens_total", number(c.loaded_tokens)},
      {"load_failures_total", number(c.load_failures)},
      {"resumed_total", number(c.resumed)},
      {"resumed_hit_tokens_total", number(c.resumed_hit_tokens)},
      {"saved_chunks_total", number(c.saved_chunks)},
      {"saved_tokens_total", number(c.saved_tokens)},
      {"save_failures_total", number(c.save_failures)},
      {"pool_full_total", number(c.pool_full)},
      {"pulls_total", number(c.pulls)},
      {"pulled_chunks_total", number(c.pulled_chunks)},
      {"pull_failures_total", number(c.pull_failures)},
      {"fetch_timeouts_total", number(c.fetch_timeouts)},
      {"leases_granted_total", number(c.leases_granted)},
      {"pins_expired_total", number(c.pins_expired)},
      {"evicted_chunks_total", number(c.evicted_chunks)},
      {"pins_refused_total", number(c.pins_refused)},
      {"pushed_chunks_total", number(c.pushed_chunks)},
      {"push_failures_total", number(c.push_failures)},
      {"received_chunks_total", number(c.received_chunks)},
      {"pool_chunks", number(core.pool().num_ready())},
      {"pool_slots", number(core.pool().num_slots())},
      {"pool_pinned_chunks", number(core.pool().num_pinned())},
      {"pool_controller_pinned_chunks", number(core.num_controller_pinned())},
      {"fetching_requests", number(core.num_fetches())},
      {"open_pushes", number(core.num_pushes())},
      {"open_push_reservations", number(core.num_reservations())},
  };
}

}  // namespace

struct SchedulerNode::Impl {
  SchedulerOptions options;
  SteadyClock clock;
  SharedCore shared;
  std::unique_ptr<NodeLinks> links;
  std::string host;
  std::uint16_t port = 0;
  Incarnation incarnation;
  std::chrono::steady_clock::duration patience_left = kLookupPatience;
  struct Reported {
    CoreCounters counters;
    std::size_t num_ready = 0, num_pinned = 0, num_controller_pinned = 0, num_fetching = 0, num_pushes = 0,
                num_reservations = 0;
    bool operator==(const Reported&) const = default;
  };
  std::optional<Reported> reported;  // state at the last take_metrics()
  TimeNs reported_at = 0;
  std::uint32_t num_ranks = 0;

  /// Runs an engine call on the core under its lock, then hands its actions to the links.
  template <class Call>
  auto with_core(Call call) {
    std::unique_lock lock(shared.mutex);
    KVFERRY_CHECK(shared.core, "a request before the workers were attached");
    const auto enqueue = [&] {
      const bool is_urgent = links->enqueue(shared.core->take_actions());
      lock.unlock();
      if (is_urgent) links->wake();
    };
    if constexpr (std::is_void_v<decltype(call(*shared.core))>) {
      call(*shared.core);
      enqueue();
    } else {
      auto result = call(*shared.core);
      enqueue();
      return result;
    }
  }
};

SchedulerNode::SchedulerNode(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
SchedulerNode::~SchedulerNode() { shutdown(); }

Result<std::unique_ptr<SchedulerNode>> SchedulerNode::start(SchedulerOptions options) {
  const ConnectorConfig& config = options.config;
  if (config.chunk_tokens % options.block_tokens != 0) {
    return Error{ErrorCode::kInvalidArgument,
                 fmt::format("chunk_tokens is '{}'; allowed: multiples of the block size, {}", config.chunk_tokens,
                             options.block_tokens)};
  }
  auto impl = std::make_unique<Impl>();
  impl->host = config.advertise_host;
  if (impl->host.empty()) {
    AdvertisedHost selected = select_advertised_host(config.controller);
    if (!selected.warning.empty()) log().warn("{}", selected.warning);
    impl->host = std::move(selected.host);
  }
  auto peers = ServerSocket::bind("tcp://" + net::to_text({impl->host, 0}));
  if (!peers) return std::move(peers).error().with(fmt::format("advertise_host '{}'", impl->host));
  impl->port = net::address_of_endpoint((*peers)->endpoint()).value().port;
  const std::string endpoint = "tcp://" + net::to_text({impl->host, impl->port});
  log().info("other nodes reach this node at {}", endpoint);
  controller::ClientOptions client;
  client.controller = config.controller;
  impl->incarnation = {static_cast<std::uint64_t>(std::chrono::system_clock::now().time_since_epoch().count())};
  client.node = {options.engine_id, impl->incarnation,   options.role, endpoint,
                 config.name_space, options.fingerprint, config.serves};
  auto directory = controller::make_client(client);
  if (!directory) return std::move(directory).error();
  if (auto registered = controller::wait_registered(**directory, impl->clock, options.start_timeout_ms); !registered)
    return std::move(registered).error();
  impl->options = std::move(options);
  impl->links = std::make_unique<NodeLinks>(impl->shared, std::move(*directory), std::move(*peers));
  return std::unique_ptr<SchedulerNode>(new SchedulerNode(std::move(impl)));
}

Result<void> SchedulerNode::attach_workers(const std::vector<std::string>& hellos) {
  std::vector<WorkerHello> workers;
  for (const std::string& bytes : hellos) {
    Result<WorkerHello> hello = decode<WorkerHello>(bytes, "worker handshake");
    if (!hello) return std::move(hello).error();
    if (hello->rank != workers.size()) {
      return Error{ErrorCode::kInvalidArgument,
                   fmt::format("the handshake of worker {} has rank {}", workers.size(), hello->rank)};
    }
    workers.push_back(std::move(*hello));
  }
  if (workers.empty()) return Error{ErrorCode::kInvalidArgument, "no worker sent a handshake"};
  std::vector<Shard> shards;
  for (const WorkerHello& worker : workers) shards.push_back(worker.endpoint.shard);
  if (auto ok = check_shards(shards); !ok) return std::move(ok).error().with("the workers' shards");
  CoreConfig config;
  const ConnectorConfig& from = impl_->options.config;
  config.fingerprint = impl_->options.fingerprint;
  config.chunk_tokens = from.chunk_tokens;
  config.block_tokens = impl_->options.block_tokens;
  config.windows = impl_->options.windows;
  config.runs_ahead = impl_->options.runs_ahead;
  // A chunk needs a slot in every rank's pool, and stages of a pipeline may differ in size.
  config.num_slots = workers[0].num_slots;
  for (const WorkerHello& worker : workers) config.num_slots = std::min(config.num_slots, worker.num_slots);
  config.first_lease = impl_->incarnation.value;
  config.num_ranks = impl_->num_ranks = static_cast<std::uint32_t>(workers.size());
  config.save_decode_cache = from.save_decode_cache;
  config.save_partial_chunks = from.save_partial_chunks;
  config.load_timeout = from.load_timeout_ms * kMillisecond;
  config.try_timeout = std::min(config.try_timeout, config.load_timeout);
  config.pull_timeout = config.load_timeout;
  {
    const std::lock_guard lock(impl_->shared.mutex);
    impl_->shared.core.emplace(std::move(config));
  }
  return impl_->links->start(workers);
}

const std::string& SchedulerNode::host() const { return impl_->host; }
std::uint16_t SchedulerNode::port() const { return impl_->port; }

void SchedulerNode::add_request(const NewRequest& request) {
  impl_->with_core([&](SchedulerCore& core) { core.add_request(request, impl_->clock.now()); });
}

void SchedulerNode::update_tokens(const RequestId& id, std::uint32_t keep, std::span<const std::int32_t> new_tokens) {
  impl_->with_core([&](SchedulerCore& core) { core.update_tokens(id, keep, new_tokens); });
}

std::uint32_t SchedulerNode::num_tokens(const RequestId& id) const {
  return impl_->with_core([&](SchedulerCore& core) { return core.num_tokens(id); });
}

Answer SchedulerNode::lookup(const RequestId& id, std::uint32_t num_local) {
  Impl& impl = *impl_;
  std::unique_lock lock(impl.shared.mutex);
  KVFERRY_CHECK(impl.shared.core, "a request before the workers were attached");
  while (true) {
    const Answer answer = impl.shared.core->lookup(id, num_local, impl.clock.now());
    if (impl.links->enqueue(impl.shared.core->take_actions())) impl.links->wake();
    if (!answer.pending || impl.patience_left <= std::chrono::steady_clock::duration::zero()) return answer;
    // A round trip takes less time than a step: a short wait saves the request a step and delays the others little.
    const auto began = std::chrono::steady_clock::now();
    impl.shared.changed.wait_for(lock, impl.patience_left);
    impl.patience_left -= std::chrono::steady_clock::now() - began;
  }
}

void SchedulerNode::allocated(const RequestId& id, std::uint32_t num_external, const BlockTable& blocks) {
  impl_->with_core([&](SchedulerCore& core) { core.allocated(id, num_external, blocks, impl_->clock.now()); });
}

std::string SchedulerNode::build_step(const StepInput& input, const TokenSource& tokens) {
  impl_->patience_left = kLookupPatience;
  return impl_->with_core([&](SchedulerCore& core) {
    const StepPlan plan = core.build_step(input, impl_->clock.now(), tokens);
    for (const std::vector<SaveJob>* jobs : {&plan.saves_before, &plan.saves_after})
      for (const SaveJob& job : *jobs)
        for (const SaveItem& item : job.items) impl_->shared.saves[item.chunk] = impl_->num_ranks;
    return encode(plan);
  });
}

FinishedRequest SchedulerNode::finished(const RequestId& id, std::uint32_t num_computed, const BlockTable& blocks,
                                        bool aborted) {
  return impl_->with_core(
      [&](SchedulerCore& core) { return core.finished(id, num_computed, blocks, aborted, impl_->clock.now()); });
}

Result<void> SchedulerNode::worker_report(std::string_view bytes) {
  const Result<WorkerReport> report = decode<WorkerReport>(bytes, "worker report");
  if (!report) return report.error();
  impl_->with_core([&](SchedulerCore& core) {
    core.worker_report(*report, impl_->clock.now());
    for (const SaveDone& save : report->saves) {
      const auto found = impl_->shared.saves.find(save.chunk);
      if (found != impl_->shared.saves.end() && --found->second == 0) impl_->shared.saves.erase(found);
    }
  });
  return {};
}

bool SchedulerNode::has_unreported_saves() const {
  const std::lock_guard lock(impl_->shared.mutex);
  return !impl_->shared.saves.empty();
}

void SchedulerNode::reset_cache() {
  impl_->with_core([](SchedulerCore& core) { core.reset_cache(); });
}

std::map<std::string, double> SchedulerNode::metrics() const {
  return impl_->with_core([](SchedulerCore& core) { return metrics_of(core); });
}

std::optional<std::map<std::string, double>> SchedulerNode::take_metrics() {
  const TimeNs now = impl_->clock.now();
  const std::lock_guard lock(impl_->shared.mutex);
  const SchedulerCore& core = *impl_->shared.core;
  const Impl::Reported state{
      core.counters(),    core.pool().num_ready(), core.pool().num_pinned(), core.num_controller_pinned(),
      core.num_fetches(), core.num_pushes(),       core.num_reservations()};
  if (state == impl_->reported || (core.num_requests() > 0 && now < impl_->reported_at + kMetricsInterval))
    return std::nullopt;
  impl_->reported = state;
  impl_->reported_at = now;
  return metrics_of(core);
}

void SchedulerNode::shutdown() {
  if (impl_->links) impl_->links->shutdown();
}

}  // namespace kvferry
