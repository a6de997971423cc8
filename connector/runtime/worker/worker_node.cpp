#include "connector/runtime/worker/worker_node.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "connector/core/worker_core.h"
#include "connector/runtime/links/node_wire.h"
#include "connector/runtime/store/chunk_store.h"
#include "connector/runtime/worker/service_loop.h"
#include "transport/base/huge_pages.h"
#include "transport/base/log.h"
#include "transport/make_transport.h"
#include "transport/shared_memory.h"

namespace kvferry {

struct WorkerNode::Impl {
  Impl(WorkerOptions from, SharedMemory memory, std::uint32_t num_slots)
      : options(std::move(from)), pool(std::move(memory)), core(options.rank, num_slots) {}

  Result<std::unique_ptr<ChunkStore>> make_store();
  void save_all(const std::vector<SaveJob>& jobs, DeviceStream stream);
  void take_saved();
  void loaded(const LoadJob& job, LoadOutcome outcome);

  WorkerOptions options;
  std::uint64_t chunk_bytes = 0;
  SteadyClock clock;
  SharedMemory pool;
  std::unique_ptr<Transport> transport;
  RegionId region;
  std::unique_ptr<ChunkStore> store;
  std::mutex mutex;  // guards core, which the service thread and the step thread share
  WorkerCore core;
  std::unique_ptr<ServiceLoop> service;
  std::string hello;
  StepPlan plan;                        // plan of the step under way
  bool wants_layers = false;            // whether this plan has saves that are pushed layer by layer
  std::set<ChunkRef> begun;             // saves of this step that save_layer() has begun
  std::map<ChunkRef, SaveItem> pushed;  // saves under way that are pushed to another node
  std::vector<BlockId> failed_blocks;
  std::vector<FinishedLoad> finished_loads;
};

WorkerNode::WorkerNode(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
WorkerNode::~WorkerNode() { shutdown(); }

Result<std::unique_ptr<WorkerNode>> WorkerNode::start(WorkerOptions options) {
  if (auto valid = options.layout.validate(); !valid) return std::move(valid).error();
  const auto num_layers = static_cast<std::uint32_t>(options.layout.layers.size());
  if (options.shard.num_layers == 0) options.shard = {0, num_layers, 0, options.layout.num_kv_heads};
  if (options.shard.num_layers != num_layers || options.shard.num_heads != options.layout.num_kv_heads) {
    return Error{
        ErrorCode::kInvalidArgument,
        fmt::format("rank {} should have {} layers of {} KV heads, but its memory has {} layers of {}", options.rank,
                    options.shard.num_layers, options.shard.num_heads, num_layers, options.layout.num_kv_heads)};
  }
  const std::uint64_t chunk_bytes = options.layout.bytes_per_token() * options.config.chunk_tokens;
  const std::uint64_t num_slots = options.config.pool_bytes / chunk_bytes;
  if (num_slots < 2 || num_slots > UINT32_MAX) {
    return Error{ErrorCode::kInvalidArgument,
                 fmt::format("pool_bytes {} holds {} chunks of {} bytes ({} tokens); at least 2 must fit",
                             options.config.pool_bytes, num_slots, chunk_bytes, options.config.chunk_tokens)};
  }
  Result<SharedMemory> memory =
      SharedMemory::create(fmt::format("{}.{}", options.label, options.rank), num_slots * chunk_bytes);
  if (!memory) return std::move(memory).error();
  auto impl = std::make_unique<Impl>(std::move(options), std::move(*memory), static_cast<std::uint32_t>(num_slots));
  impl->chunk_bytes = chunk_bytes;
  const ConnectorConfig& config = impl->options.config;
  TransportOptions transport_options;
  const Result<Path> path = parse_path(config.path);
  if (!path) return path.error();
  transport_options.path = *path;
  transport_options.tcp.listen_host = config.advertise_host;
  if (impl->options.gpu && config.lands_in_gpu) transport_options.device = impl->options.gpu->device.get();
  auto transport = make_transport(transport_options);
  if (!transport) return std::move(transport).error();
  impl->transport = std::move(*transport);
  auto region = impl->transport->register_region(impl->pool.region());
  if (!region) return std::move(region).error().with("registering the chunk pool");
  impl->region = *region;
  auto exported = impl->transport->export_region(*region);
  if (!exported) return std::move(exported).error();
  auto store = impl->make_store();
  if (!store) return std::move(store).error();
  impl->store = std::move(*store);
  auto service =
      ServiceLoop::start({*impl->transport, *impl->store, impl->mutex, impl->core, impl->clock, impl->pool.span(),
                          impl->region, chunk_bytes, impl->options.layout.bytes_per_token(), num_layers});
  if (!service) return std::move(service).error();
  impl->service = std::move(*service);
  impl->hello =
      encode(WorkerHello{impl->options.rank,
                         impl->service->endpoint(),
                         static_cast<std::uint32_t>(num_slots),
                         {impl->transport->address(), std::move(*exported), chunk_bytes, impl->options.shard}});
  return std::unique_ptr<WorkerNode>(new WorkerNode(std::move(impl)));
}

Result<std::unique_ptr<ChunkStore>> WorkerNode::Impl::make_store() {
  ChunkStoreParts parts{options.layout, options.rank, pool.span(), chunk_bytes, region};
  if (!options.gpu) return make_host_store(std::move(parts));
  return make_gpu_store(std::move(parts), {*options.gpu, options.config.gpu_pool_bytes, options.config.lands_in_gpu,
                                           options.device_timeout, clock, *transport});
}

std::string WorkerNode::handshake() const { return impl_->hello; }

std::string WorkerNode::describe() const {
  const std::string tiers = impl_->store->describe();
  return fmt::format(
      "rank {}: pool of {:.1f} MiB of shared memory ({:.0f} % huge pages), {} chunks of {} tokens ({:.1f} KiB); {}{}{}",
      impl_->options.rank, static_cast<double>(impl_->pool.bytes()) / (1 << 20),
      100.0 * static_cast<double>(huge_page_bytes(impl_->pool.span())) / static_cast<double>(impl_->pool.bytes()),
      impl_->pool.bytes() / impl_->chunk_bytes, impl_->options.config.chunk_tokens,
      static_cast<double>(impl_->chunk_bytes) / 1024, impl_->transport->describe(), tiers.empty() ? "" : "; ", tiers);
}

Result<void> WorkerNode::begin_step(std::string_view bytes, DeviceStream stream) {
  Result<StepPlan> plan = decode<StepPlan>(bytes, "step plan");
  if (!plan) return std::move(plan).error();
  impl_->plan = std::move(*plan);
  impl_->wants_layers = !impl_->options.gpu;
  const auto has_push = [](const SaveJob& job) {
    return std::any_of(job.items.begin(), job.items.end(), [](const SaveItem& item) { return item.push != 0; });
  };
  impl_->wants_layers &= std::any_of(impl_->plan.saves_after.begin(), impl_->plan.saves_after.end(), has_push);
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->core.begin_step(impl_->plan.step);
  }
  impl_->save_all(std::exchange(impl_->plan.saves_before, {}), stream);
  return {};
}

void WorkerNode::load(DeviceStream stream) {
  const std::vector<LoadJob> jobs = std::exchange(impl_->plan.loads, {});
  if (jobs.empty()) return;
  const auto is_readable = [&](ChunkRef chunk) {
    const std::lock_guard lock(impl_->mutex);
    return impl_->core.readable(chunk);
  };
  std::vector<LoadOutcome> outcomes = impl_->store->load(jobs, is_readable, stream);
  for (std::size_t i = 0; i < jobs.size(); ++i) impl_->loaded(jobs[i], std::move(outcomes[i]));
}

bool WorkerNode::wants_layers() const { return impl_->wants_layers; }

void WorkerNode::save_layer(std::uint32_t layer) {
  if (!impl_->wants_layers) return;
  for (const SaveJob& job : impl_->plan.saves_after) {
    for (const SaveItem& item : job.items) {
      if (item.push == 0) continue;
      if (impl_->begun.insert(item.chunk).second) {
        const std::lock_guard lock(impl_->mutex);
        impl_->core.begin_write(item.chunk);
      }
      // If this fails, save() packs the whole chunk and reports the outcome.
      if (const auto checksum = impl_->store->save_layer(job, item, layer))
        impl_->service->pusher().layer_saved(item, layer, *checksum);
    }
  }
}

void WorkerNode::save(DeviceStream stream) { impl_->save_all(std::exchange(impl_->plan.saves_after, {}), stream); }

void WorkerNode::Impl::save_all(const std::vector<SaveJob>& jobs, DeviceStream stream) {
  if (jobs.empty()) return;
  {
    const std::lock_guard lock(mutex);
    for (const SaveJob& job : jobs)
      for (const SaveItem& item : job.items) {
        if (begun.erase(item.chunk) == 0) core.begin_write(item.chunk);
        if (item.push != 0) pushed.emplace(item.chunk, item);
      }
  }
  store->save(jobs, stream);
  take_saved();
}

void WorkerNode::Impl::take_saved() {
  const std::vector<SaveDone> saved = store->take_saved();
  {
    const std::lock_guard lock(mutex);
    for (const SaveDone& save : saved) core.saved(save.chunk, save.ok, save.checksum);
  }
  for (const SaveDone& save : saved)
    if (const auto push = pushed.extract(save.chunk)) service->pusher().saved(push.mapped(), save.ok, save.checksum);
}

void WorkerNode::Impl::loaded(const LoadJob& job, LoadOutcome outcome) {
  std::uint32_t wanted = 0;
  for (const LoadItem& item : job.items) wanted += item.num_tokens;
  const bool is_whole = outcome.tokens_loaded == wanted;
  if (!is_whole) {
    log().warn("request {}: loaded {} of {} tokens; the rest is recomputed", job.request_id, outcome.tokens_loaded,
               wanted);
  }
  if (job.is_async) {
    finished_loads.push_back({job.request_id, is_whole});
  } else if (!is_whole) {
    const std::uint32_t first_bad = job.items.front().first_token + outcome.tokens_loaded;
    const std::vector<BlockId>& blocks = job.block_ids.front();
    failed_blocks.insert(failed_blocks.end(), blocks.begin() + first_bad / options.layout.block_tokens, blocks.end());
  }
  const std::lock_guard lock(mutex);
  core.loaded(job, std::move(outcome));
}

std::optional<std::string> WorkerNode::take_report() {
  impl_->take_saved();
  const std::lock_guard lock(impl_->mutex);
  const std::optional<WorkerReport> report = impl_->core.take_report();
  if (!report) return std::nullopt;
  return encode(*report);
}

std::vector<WorkerNode::FinishedLoad> WorkerNode::take_finished_loads() {
  return std::exchange(impl_->finished_loads, {});
}

std::vector<BlockId> WorkerNode::take_failed_blocks() { return std::exchange(impl_->failed_blocks, {}); }

void WorkerNode::shutdown() {
  if (impl_->service) impl_->service->shutdown();
  if (impl_->transport) impl_->transport->shutdown();
}

}  // namespace kvferry
