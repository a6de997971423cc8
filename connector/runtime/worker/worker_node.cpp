#include "connector/runtime/worker/worker_node.h"

#include <algorithm>
#include <utility>

#include "connector/runtime/links/node_wire.h"
#include "connector/runtime/worker/pool_sizes.h"
#include "kernels/chunk_shape.h"
#include "transport/base/log.h"
#include "transport/base/memory/large_memory.h"
#include "transport/base/memory/numa.h"
#include "transport/base/net/near_nics.h"
#include "transport/make_transport.h"

namespace kvferry {
namespace {

std::string pci_bus_id(const WorkerOptions& options) { return options.gpu ? options.gpu->device->pci_bus_id() : ""; }

/// Returns a text for the log that says how loads convert chunks; empty if they convert nothing.
std::string conversions(const std::vector<ChunkFormat>& formats) {
  std::set<std::string> found;
  for (const ChunkFormat& format : formats)
    if (format.cache_type != format.chunk_type)
      found.insert(
          fmt::format("{} of chunks to {} of the KV cache", name_of(format.chunk_type), name_of(format.cache_type)));
  return found.empty() ? "" : fmt::format("; loads convert {}", fmt::join(found, ", "));
}

/// Makes the pool's memory, on the NUMA node of the rank's GPU if that node has room.
Result<SharedMemory> make_pool(const WorkerOptions& options, std::uint64_t bytes) {
  const NumaPreference near_gpu(net::numa_node_of("/", pci_bus_id(options)));
  return SharedMemory::create(fmt::format("{}.{}", options.label, options.rank), bytes);
}

}  // namespace

Result<std::unique_ptr<WorkerNode>> WorkerNode::start(WorkerOptions options) {
  std::vector<std::uint64_t> layer_bytes;  // [layer] bytes of a token in this layer of a chunk
  std::uint64_t token_bytes = 0;
  if (!options.formats.empty() && options.formats.size() != options.layouts.size())
    return Error{ErrorCode::kInvalidArgument,
                 fmt::format("rank {} has {} KV layouts, but element types for {}; it needs one for each", options.rank,
                             options.layouts.size(), options.formats.size())};
  for (std::size_t i = 0; i < options.layouts.size(); ++i) {
    const KvLayout& layout = options.layouts[i];
    KVFERRY_TRY(layout.validate());
    const ChunkShape shape = KVFERRY_TRY(resolve(layout, options.formats.empty() ? ChunkFormat{} : options.formats[i]));
    layer_bytes.insert(layer_bytes.end(), layout.layers.size(), shape.bytes_per_token / layout.layers.size());
    token_bytes += shape.bytes_per_token;
  }
  if (layer_bytes.empty())
    return Error{ErrorCode::kInvalidArgument,
                 fmt::format("rank {} has no layers with KV; at least one is needed", options.rank)};
  const auto num_layers = static_cast<std::uint32_t>(layer_bytes.size());
  // If layers have unlike shapes, each layer is one cell, since their numbers of heads may differ.
  const std::uint32_t num_heads = options.layouts.size() == 1 ? options.layouts[0].num_kv_heads : 1;
  if (options.shard.num_layers == 0) options.shard = {0, num_layers, 0, num_heads};
  if (options.shard.num_layers != num_layers || options.shard.num_heads != num_heads) {
    return Error{
        ErrorCode::kInvalidArgument,
        fmt::format("rank {} should have {} layers of {} KV heads, but its KV layout has {} layers of {} KV heads",
                    options.rank, options.shard.num_layers, options.shard.num_heads, num_layers, num_heads)};
  }
  const bool has_default_pool = options.config.pool_bytes == 0;
  if (has_default_pool) options.config.pool_bytes = default_pool_bytes(SharedMemory::available_bytes());
  const std::uint64_t chunk_bytes = token_bytes * options.config.chunk_tokens;
  if (!options.parts.kinds.empty()) {
    KVFERRY_TRY(check_parts(std::span(&options.parts, 1)));
    const std::uint64_t part_bytes = options.parts.num_bytes();
    if (options.parts.first_layer != options.shard.first_layer || options.parts.kinds.size() != num_layers ||
        part_bytes != chunk_bytes)
      return Error{ErrorCode::kInvalidArgument,
                   fmt::format("rank {} has parts of {} layers from layer {} on with {} bytes in a chunk, but its KV "
                               "layout has {} layers from layer {} on with {} bytes",
                               options.rank, options.parts.kinds.size(), options.parts.first_layer, part_bytes,
                               num_layers, options.shard.first_layer, chunk_bytes)};
  }
  const std::uint64_t num_slots = options.config.pool_bytes / chunk_bytes;
  if (num_slots < 2 || num_slots > UINT32_MAX) {
    return Error{
        ErrorCode::kInvalidArgument,
        fmt::format(
            "pool_bytes {} has room for {} chunks of {} bytes ({} tokens each); allowed: room for 2 to {} chunks",
            options.config.pool_bytes, num_slots, chunk_bytes, options.config.chunk_tokens, UINT32_MAX)};
  }
  SharedMemory memory = KVFERRY_TRY(make_pool(options, num_slots * chunk_bytes));
  std::unique_ptr<WorkerNode> node(
      new WorkerNode(std::move(options), std::move(memory), static_cast<std::uint32_t>(num_slots)));
  node->chunk_bytes_ = chunk_bytes;
  node->has_default_pool_ = has_default_pool;
  node->choose_gpu_pool();
  const ConnectorConfig& config = node->options_.config;
  TransportOptions transport = KVFERRY_TRY(transport_options(config, pci_bus_id(node->options_)));
  if (node->options_.gpu && config.gpu_pool_bytes > 0 && config.lands_in_gpu)
    transport.device = node->options_.gpu->device.get();
  // The pool is pinned for the GPU before the transport is made, since UCX would otherwise page-lock it by itself.
  if (node->options_.gpu) {
    Result<DevicePin> pin = DevicePin::make(*node->options_.gpu->device, node->pool_.span());
    if (!pin)
      return std::move(pin).error().with(
          fmt::format("can't lock the chunk pool of {} bytes in memory for the GPU", node->pool_.bytes()));
    node->pool_pin_ = std::move(*pin);
  }
  node->transport_ = KVFERRY_TRY(make_transport(transport));
  MemoryRegion pool = node->pool_.region();
  pool.needs_grant_to_write = true;
  auto region = node->transport_->register_region(pool);
  if (!region)
    return std::move(region).error().with(fmt::format(
        "can't register the chunk pool of {} bytes with the transport (path {})", node->pool_.bytes(), config.path));
  node->region_ = *region;
  auto exported = KVFERRY_TRY(node->transport_->export_region(*region));
  node->store_ = KVFERRY_TRY(node->make_store());
  node->service_ = KVFERRY_TRY(
      ServiceLoop::start({*node->transport_, *node->store_, node->core_, node->clock_, node->pool_.span(),
                          node->region_, chunk_bytes, token_bytes, std::move(layer_bytes), config.push_layers}));
  RankEndpoint endpoint{node->transport_->address(), std::move(exported), chunk_bytes, node->options_.shard};
  endpoint.parts = node->options_.parts;
  if (const auto frames = node->store_->frames()) {
    endpoint.frames_region = KVFERRY_TRY(node->transport_->export_region(frames->region));
    endpoint.frame_bytes = frames->frame_bytes;
  }
  node->hello_ = encode(WorkerHello{node->options_.rank, node->service_->endpoint(),
                                    static_cast<std::uint32_t>(num_slots), std::move(endpoint)});
  log().info("{}", node->describe());
  return node;
}

/// Sets the size of the GPU's pool if the settings have none. The engine has allocated its weights and its KV cache by
/// now.
void WorkerNode::choose_gpu_pool() {
  std::uint64_t& bytes = options_.config.gpu_pool_bytes;
  has_default_gpu_pool_ = bytes == ConnectorConfig::kShareOfGpu;
  if (!has_default_gpu_pool_) return;
  bytes = 0;
  if (!options_.gpu) return;
  if (const auto free = options_.gpu->device->free_bytes())
    bytes = default_gpu_pool_bytes(*free, pool_.bytes());
  else
    log().warn("no chunks are kept in GPU memory, because its free size can't be read: {}", free.error().what);
  if (bytes < 2 * chunk_bytes_) bytes = 0;  // too little GPU memory is left for a pool of chunks
}

Result<std::unique_ptr<ChunkStore>> WorkerNode::make_store() {
  const ChunkStoreParts parts{options_.layouts, options_.rank, pool_.span(), chunk_bytes_, region_, options_.formats};
  if (!options_.gpu) return make_host_store(parts);
  GpuTier tier{
      *options_.gpu, options_.config.gpu_pool_bytes, options_.config.lands_in_gpu, options_.device_timeout, clock_,
      *transport_};
  auto store = make_gpu_store(parts, tier);
  if (store || !has_default_gpu_pool_ || tier.bytes == 0) return store;
  log().warn("no chunks are kept in GPU memory, because the default of gpu_pool_bytes ({}) does not work: {}",
             tier.bytes, store.error().what);
  tier.bytes = 0;
  return make_gpu_store(parts, tier);
}

std::string WorkerNode::describe() const {
  const std::string tiers = store_->describe();
  const int numa_node = options_.gpu ? numa_node_at(pool_.data()) : -1;  // -1: unknown, or the rank has no GPU
  return fmt::format(
      "rank {}: its pool has {:.1f} MiB of shared memory{}, {:.0f} % of it in huge pages{}, for {} chunks of {} tokens "
      "and {:.1f} KiB each; transport: {}{}{}{}{}",
      options_.rank, static_cast<double>(pool_.bytes()) / (1 << 20),
      has_default_pool_ ? " (the default of pool_bytes)" : "",
      100.0 * static_cast<double>(huge_page_bytes(pool_.span())) / static_cast<double>(pool_.bytes()),
      numa_node >= 0 ? fmt::format(", on NUMA node {}", numa_node) : "", pool_.bytes() / chunk_bytes_,
      options_.config.chunk_tokens, static_cast<double>(chunk_bytes_) / 1024, transport_->describe(),
      tiers.empty() ? "" : "; ", tiers,
      !tiers.empty() && has_default_gpu_pool_ ? " (by the default of gpu_pool_bytes)" : "",
      conversions(options_.formats));
}

void WorkerNode::shutdown() {
  if (service_) service_->shutdown();
  if (transport_) transport_->shutdown();
}

}  // namespace kvferry
