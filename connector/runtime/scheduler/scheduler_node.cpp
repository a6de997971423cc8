#include "connector/runtime/scheduler/scheduler_node.h"

#include <chrono>
#include <numeric>
#include <random>
#include <utility>

#include "connector/runtime/links/shapes.h"
#include "connector/runtime/net_address.h"
#include "controller/api/endpoint.h"
#include "transport/base/check.h"
#include "transport/base/log.h"
#include "transport/base/net/this_host.h"
#include "transport/base/wall_clock.h"

namespace kvferry {
namespace {

constexpr std::chrono::milliseconds kLookupPatience{2};  // limit on the time that lookups wait for answers, per step
// Sizes of the flight recorder, which takes about 10 MB. A request has about a dozen events.
constexpr std::uint32_t kRecordedEvents = 1 << 15, kRecordedRequests = 1 << 12;
constexpr TimeNs kMetricsInterval = 100 * kMillisecond;

std::map<std::string, double> by_name(const NodeMetrics& metrics) { return {metrics.begin(), metrics.end()}; }

}  // namespace

SchedulerNode::SchedulerNode(SchedulerOptions options, net::HostPort address, std::string member,
                             Incarnation incarnation, std::unique_ptr<controller::Client> directory,
                             std::unique_ptr<ServerSocket> peers)
    : options_(std::move(options)),
      address_(std::move(address)),
      member_(std::move(member)),
      incarnation_(incarnation),
      links_(shared_, std::move(directory), std::move(peers)),
      patience_left_(kLookupPatience) {}

template <class Call>
auto SchedulerNode::with_core(Call call) {
  std::unique_lock lock(shared_.mutex);
  KVFERRY_CHECK(shared_.core, "vLLM has called the scheduler connector before it passed on the workers' handshakes");
  const auto enqueue = [&] {
    const bool is_urgent = links_.enqueue(shared_.core->take_actions());
    lock.unlock();
    if (is_urgent) links_.wake();
  };
  if constexpr (std::is_void_v<decltype(call(*shared_.core))>) {
    call(*shared_.core);
    enqueue();
  } else {
    auto result = call(*shared_.core);
    enqueue();
    return result;
  }
}

Result<std::unique_ptr<SchedulerNode>> SchedulerNode::start(SchedulerOptions options) {
  const ConnectorConfig& config = options.config;
  std::uint32_t block_tokens = 1;
  for (const KvGroup& group : options.groups) block_tokens = std::lcm(block_tokens, group.block_tokens);
  if (config.chunk_tokens % block_tokens != 0) {
    return Error{ErrorCode::kInvalidArgument,
                 fmt::format("chunk_tokens is '{}'; allowed: multiples of the block size ({} tokens)",
                             config.chunk_tokens, block_tokens)};
  }
  net::HostPort address{config.advertise_host, 0};
  if (address.host.empty()) {
    AdvertisedHost selected = select_advertised_host(config.controller);
    if (!selected.warning.empty()) log().warn("{}", selected.warning);
    address.host = std::move(selected.host);
  }
  const std::optional<net::ClusterKey> key = KVFERRY_TRY(net::read_cluster_key(config.cluster_key_file));
  const std::string listens_at = "tcp://" + net::to_text(address);
  if (!key && !config.insecure) KVFERRY_TRY(controller::check_without_key(listens_at));
  if (!key && controller::is_beyond_loopback(listens_at))
    log().warn("insecure: without cluster_key_file, every host that reaches {} can read and replace this node's chunks",
               address.host);
  ZmqContextRef context;
  if (key) context = std::make_shared<net::ZmqContext>(net::ZmqContext::kSocketsMaxDefault, key, net::Servers::kNodes);
  const net::PortRange ports = KVFERRY_TRY(net::parse_port_range(config.ports));
  auto peers = net::listen_in_range(ports, [&](std::uint16_t port) {
    return ServerSocket::bind("tcp://" + net::to_text({address.host, port}), context);
  });
  if (!peers)
    return std::move(peers).error().with(
        fmt::format("can't listen at {}, the address of this host (advertise_host)", address.host));
  address.port = net::address_of_endpoint((*peers)->endpoint()).value().port;
  const std::string endpoint = "tcp://" + net::to_text(address);
  log().info("other nodes reach this node at {}", endpoint);
  std::string prepared = options.prepared_tokens_max > 0 ? fmt::format("{}", options.prepared_tokens_max) : "";
  controller::ClientOptions client;
  client.controller = config.controller;
  client.cluster_key = key;
  client.lost_after_ms = config.silence_ms;
  client.wall_ms = wall_clock_ms;
  const Incarnation incarnation{
      static_cast<std::uint64_t>(std::chrono::system_clock::now().time_since_epoch().count())};
  client.node = {.engine_id = options.engine_id,
                 .incarnation = incarnation,
                 .role = options.role,
                 .endpoint = endpoint,
                 .name_space = config.name_space,
                 .fingerprint = options.fingerprint,
                 .serves = config.serves,
                 .details = {.host = net::name_of_this_host(),
                             .prepared_tokens_max = std::move(prepared),
                             .conversion = options.conversion}};
  auto directory = KVFERRY_TRY(controller::make_registered_client(client, SteadyClock(), options.start_timeout_ms));
  return std::unique_ptr<SchedulerNode>(new SchedulerNode(std::move(options), std::move(address),
                                                          key ? key->own_identity().name : "", client.node.incarnation,
                                                          std::move(directory), std::move(*peers)));
}

Result<void> SchedulerNode::attach_workers(const std::vector<std::string>& hellos) {
  std::vector<WorkerHello> workers;
  for (const std::string& bytes : hellos) {
    WorkerHello hello = KVFERRY_TRY(decode<WorkerHello>(bytes, "worker handshake"));
    if (hello.rank != workers.size()) {
      return Error{ErrorCode::kInvalidArgument,
                   fmt::format("the handshake at position {} is that of the worker of rank {}; vLLM must pass the "
                               "handshakes on in the order of the ranks, from rank 0",
                               workers.size(), hello.rank)};
    }
    workers.push_back(std::move(hello));
  }
  if (workers.empty())
    return Error{ErrorCode::kInvalidArgument,
                 "vLLM has passed on no handshake of a worker; one of each rank is needed"};
  std::vector<RankEndpoint> ranks;
  for (const WorkerHello& worker : workers) ranks.push_back(worker.endpoint);
  if (auto ok = check_ranks(ranks); !ok)
    return std::move(ok).error().with("kvferry can't serve the parts of the model that the workers hold");
  CoreConfig config;
  const ConnectorConfig& from = options_.config;
  config.fingerprint = options_.fingerprint;
  config.endpoint = "tcp://" + net::to_text(address_);
  config.member = member_;
  config.chunk_tokens = from.chunk_tokens;
  config.groups = options_.groups;
  config.whole_blocks = options_.whole_blocks;
  config.keeps_state = options_.keeps_state;
  config.checkpoint_alignment = options_.checkpoint_alignment;
  config.runs_ahead = options_.runs_ahead;
  config.on_device = options_.on_device;
  config.prepared_tokens_max = options_.prepared_tokens_max;
  // A chunk needs a slot in every rank's pool. Pipeline stages may differ in size, so the smallest pool decides.
  config.num_slots = workers[0].num_slots;
  for (const WorkerHello& worker : workers) {
    config.num_slots = std::min(config.num_slots, worker.num_slots);
    config.chunk_bytes += worker.endpoint.chunk_bytes;
  }
  config.num_recorded_events = kRecordedEvents;
  config.num_recorded_requests = kRecordedRequests;
  std::random_device random;
  for (int word = 0; word < 8; ++word) config.secret += fmt::format("{:08x}", random());
  config.num_ranks = num_ranks_ = static_cast<std::uint32_t>(workers.size());
  config.only_reads = !options_.conversion.empty();
  config.pushes_layers = from.push_layers > 0;
  config.save_decode_cache = from.save_decode_cache;
  config.save_partial_chunks = from.save_partial_chunks;
  config.load_timeout = from.load_timeout_ms * kMillisecond;
  config.try_timeout = std::min(config.try_timeout, config.load_timeout);
  config.pull_timeout = config.load_timeout;
  {
    const std::lock_guard lock(shared_.mutex);
    shared_.core.emplace(std::move(config));
  }
  return links_.start(workers);
}

void SchedulerNode::add_request(NewRequest request) {
  with_core([&](SchedulerCore& core) { core.add_request(std::move(request), clock_.now()); });
}

void SchedulerNode::update_tokens(const RequestId& id, std::uint32_t keep, std::span<const std::int32_t> new_tokens) {
  with_core([&](SchedulerCore& core) { core.update_tokens(id, keep, new_tokens); });
}

std::uint32_t SchedulerNode::num_tokens(const RequestId& id) {
  return with_core([&](SchedulerCore& core) { return core.num_tokens(id); });
}

Answer SchedulerNode::lookup(const RequestId& id, std::uint32_t num_local) {
  std::unique_lock lock(shared_.mutex);
  KVFERRY_CHECK(shared_.core, "vLLM has called the scheduler connector before it passed on the workers' handshakes");
  while (true) {
    const Answer answer = shared_.core->lookup(id, num_local, clock_.now());
    num_engine_purges_ = shared_.core->last_purge().num_of_engine;
    if (links_.enqueue(shared_.core->take_actions())) links_.wake();
    if (!answer.pending || answer.awaits_step || patience_left_ <= std::chrono::steady_clock::duration::zero())
      return answer;
    // A round trip to another node often takes less time than a step. A short wait may thus save this request one step,
    // and delays other requests only a little.
    const auto began = std::chrono::steady_clock::now();
    shared_.changed.wait_for(lock, patience_left_);
    patience_left_ -= std::chrono::steady_clock::now() - began;
  }
}

void SchedulerNode::allocated(const RequestId& id, std::uint32_t num_external, const BlockTable& blocks) {
  with_core([&](SchedulerCore& core) { core.allocated(id, num_external, blocks, clock_.now()); });
}

std::string SchedulerNode::build_step(const StepInput& input, const TokenSource& tokens) {
  patience_left_ = kLookupPatience;
  return with_core([&](SchedulerCore& core) {
    const StepPlan plan = core.build_step(input, clock_.now(), tokens);
    num_engine_purges_ = core.last_purge().num_of_engine;
    for (const std::vector<SaveJob>* jobs : {&plan.saves_before, &plan.saves_after})
      for (const SaveJob& job : *jobs)
        for (const SaveItem& item : job.items) shared_.saves[item.chunk] = num_ranks_;
    return encode(plan);
  });
}

FinishedRequest SchedulerNode::finished(const RequestId& id, std::uint32_t num_computed, const BlockTable& blocks,
                                        bool aborted) {
  return with_core([&](SchedulerCore& core) { return core.finished(id, num_computed, blocks, aborted, clock_.now()); });
}

Result<void> SchedulerNode::worker_report(std::string_view bytes) {
  const WorkerReport report = KVFERRY_TRY(decode<WorkerReport>(bytes, "worker report"));
  with_core([&](SchedulerCore& core) {
    core.worker_report(report, clock_.now());
    for (const SaveDone& save : report.saves) {
      if (save.is_in_frame) continue;  // the chunk is reported once more
      const auto found = shared_.saves.find(save.chunk);
      if (found != shared_.saves.end() && --found->second == 0) shared_.saves.erase(found);
    }
  });
  return {};
}

bool SchedulerNode::has_unreported_saves() const {
  const std::lock_guard lock(shared_.mutex);
  return !shared_.saves.empty();
}

bool SchedulerNode::has_unreported_loads() const {
  const std::lock_guard lock(shared_.mutex);
  return shared_.core && shared_.core->has_unreported_loads();
}

void SchedulerNode::reset_cache() {
  with_core([](SchedulerCore& core) { core.reset_cache(); });
}

void SchedulerNode::set_weights_epoch(std::string epoch) {
  const std::lock_guard lock(shared_.mutex);
  shared_.weights_epoch = std::move(epoch);
}

void SchedulerNode::track_pool() {
  with_core([](SchedulerCore& core) { core.track_pool(); });
}

PoolChanges SchedulerNode::take_pool_changes() {
  return with_core([](SchedulerCore& core) { return core.take_pool_changes(); });
}

std::vector<NamedChunk> SchedulerNode::take_named_chunks() {
  return with_core([](SchedulerCore& core) { return core.take_named_chunks(); });
}

std::map<std::string, double> SchedulerNode::metrics() {
  return with_core([](SchedulerCore& core) { return by_name(metrics_of(core)); });
}

std::optional<std::map<std::string, double>> SchedulerNode::take_metrics() {
  const TimeNs now = clock_.now();
  const std::lock_guard lock(shared_.mutex);
  if (shared_.core->num_requests() > 0 && now < reported_at_ + kMetricsInterval) return std::nullopt;
  NodeMetrics current = metrics_of(*shared_.core);
  if (current == reported_) return std::nullopt;
  reported_ = std::move(current);
  reported_at_ = now;
  return by_name(reported_);
}

std::pair<std::uint64_t, std::vector<RequestLife>> SchedulerNode::transfers_after(std::uint64_t number) {
  const std::lock_guard lock(shared_.mutex);
  const FlightRecorder& recorder = shared_.core->recorder();
  return {recorder.last(), recorder.transfers_after(number, clock_.now())};
}

}  // namespace kvferry
