#include "connector/runtime/worker_node.h"

#include <mutex>
#include <utility>

#include "connector/core/worker_core.h"
#include "connector/runtime/node_wire.h"
#include "connector/runtime/pull_engine.h"
#include "kernels/packer.h"
#include "transport/base/huge_pages.h"
#include "transport/base/log.h"
#include "transport/shared_memory.h"

namespace kvferry {

struct WorkerNode::Impl {
  Impl(WorkerOptions from, SharedMemory memory, std::uint32_t num_slots)
      : options(std::move(from)), pool(std::move(memory)), core(options.rank, num_slots) {}

  std::span<std::byte> slot_bytes(ChunkRef chunk, std::uint64_t tokens) {
    return pool.span().subspan(chunk.slot * chunk_bytes, tokens * options.layout.bytes_per_token());
  }
  void save_all(const std::vector<SaveJob>& jobs);
  void load_one(const LoadJob& job);
  LoadOutcome unpack(const LoadJob& job);

  WorkerOptions options;
  std::uint64_t chunk_bytes = 0;
  SharedMemory pool;
  std::unique_ptr<Packer> packer;
  std::unique_ptr<Transport> transport;
  RegionId region;
  std::mutex mutex;  // guards core; the pull thread and the step thread share it
  WorkerCore core;
  std::unique_ptr<PullEngine> pulls;
  std::string hello;
  StepPlan plan;  // of the step under way
  std::vector<BlockId> failed_blocks;
  std::vector<FinishedLoad> finished_loads;
};

WorkerNode::WorkerNode(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
WorkerNode::~WorkerNode() { shutdown(); }

Result<std::unique_ptr<WorkerNode>> WorkerNode::start(WorkerOptions options) {
  if (auto valid = options.layout.validate(); !valid) return std::move(valid).error();
  const std::uint64_t chunk_bytes = options.layout.bytes_per_token() * options.chunk_tokens;
  const std::uint64_t num_slots = options.pool_bytes / chunk_bytes;
  if (num_slots < 2 || num_slots > UINT32_MAX) {
    return Error{ErrorCode::kInvalidArgument,
                 fmt::format("pool_bytes {} holds {} chunks of {} bytes ({} tokens); at least 2 must fit",
                             options.pool_bytes, num_slots, chunk_bytes, options.chunk_tokens)};
  }
  Result<SharedMemory> memory =
      SharedMemory::create(fmt::format("{}.{}", options.label, options.rank), num_slots * chunk_bytes);
  if (!memory) return std::move(memory).error();
  auto impl = std::make_unique<Impl>(std::move(options), std::move(*memory), static_cast<std::uint32_t>(num_slots));
  impl->chunk_bytes = chunk_bytes;
  auto packer = make_host_packer(impl->options.layout);
  if (!packer) return std::move(packer).error();
  impl->packer = std::move(*packer);
  auto transport = make_transport(impl->options.transport);
  if (!transport) return std::move(transport).error();
  impl->transport = std::move(*transport);
  auto region = impl->transport->register_region(impl->pool.region());
  if (!region) return std::move(region).error().with("registering the chunk pool");
  impl->region = *region;
  auto exported = impl->transport->export_region(*region);
  if (!exported) return std::move(exported).error();
  auto pulls = PullEngine::start({*impl->transport, impl->region, impl->pool.span(), impl->chunk_bytes,
                                  impl->options.layout.bytes_per_token(), impl->mutex, impl->core});
  if (!pulls) return std::move(pulls).error();
  impl->pulls = std::move(*pulls);
  impl->hello = encode(WorkerHello{impl->options.rank,
                                   impl->pulls->endpoint(),
                                   static_cast<std::uint32_t>(num_slots),
                                   {impl->transport->address(), std::move(*exported), chunk_bytes}});
  return std::unique_ptr<WorkerNode>(new WorkerNode(std::move(impl)));
}

std::string WorkerNode::handshake() const { return impl_->hello; }

std::string WorkerNode::describe() const {
  return fmt::format(
      "rank {}: pool of {:.1f} MiB of shared memory ({:.0f} % huge pages), {} chunks of {} tokens ({:.1f} KiB); {}",
      impl_->options.rank, static_cast<double>(impl_->pool.bytes()) / (1 << 20),
      100.0 * static_cast<double>(huge_page_bytes(impl_->pool.span())) / static_cast<double>(impl_->pool.bytes()),
      impl_->pool.bytes() / impl_->chunk_bytes, impl_->options.chunk_tokens,
      static_cast<double>(impl_->chunk_bytes) / 1024, impl_->transport->describe());
}

Result<void> WorkerNode::begin_step(std::string_view bytes) {
  Result<StepPlan> plan = decode<StepPlan>(bytes, "step plan");
  if (!plan) return std::move(plan).error();
  impl_->plan = std::move(*plan);
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->core.begin_step(impl_->plan.step);
  }
  impl_->save_all(std::exchange(impl_->plan.saves_before, {}));
  return {};
}

void WorkerNode::load() {
  for (const LoadJob& job : std::exchange(impl_->plan.loads, {})) impl_->load_one(job);
}

void WorkerNode::save() { impl_->save_all(std::exchange(impl_->plan.saves_after, {})); }

void WorkerNode::Impl::save_all(const std::vector<SaveJob>& jobs) {
  for (const SaveJob& job : jobs) {
    for (const SaveItem& item : job.items) {
      {
        const std::lock_guard lock(mutex);
        core.begin_write(item.chunk);
      }
      const Result<std::uint64_t> checksum =
          packer->gather({item.first_token, item.num_tokens, job.block_ids}, slot_bytes(item.chunk, item.num_tokens));
      if (!checksum)
        log().error("saving {} tokens of request {}: {}", item.num_tokens, job.request_id, checksum.error().what);
      const std::lock_guard lock(mutex);
      core.saved(item.chunk, static_cast<bool>(checksum), checksum ? *checksum : 0);
    }
  }
}

void WorkerNode::Impl::load_one(const LoadJob& job) {
  LoadOutcome outcome = unpack(job);
  std::uint32_t wanted = 0;
  for (const LoadItem& item : job.items) wanted += item.num_tokens;
  const bool is_whole = outcome.tokens_loaded == wanted;
  if (!is_whole) {
    log().warn("request {}: {} of {} tokens loaded, the rest is recomputed", job.request_id, outcome.tokens_loaded,
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

/// Stops at the first chunk that is not what the plan says: what lies behind it can't be attended anyway.
LoadOutcome WorkerNode::Impl::unpack(const LoadJob& job) {
  LoadOutcome outcome;
  for (const LoadItem& item : job.items) {
    const std::span<const std::byte> bytes = slot_bytes(item.chunk, item.chunk_tokens);
    bool good;
    {
      const std::lock_guard lock(mutex);
      good = core.readable(item.chunk);
    }
    good = good && options.rank < item.checksums.size() && chunk_checksum(bytes) == item.checksums[options.rank];
    if (!good) {
      outcome.corrupt.push_back(item.chunk);
      return outcome;
    }
    const Result<void> done =
        packer->scatter(bytes, item.chunk_tokens, item.skip_tokens, {item.first_token, item.num_tokens, job.block_ids});
    if (!done) {
      log().error("loading {} tokens of request {}: {}", item.num_tokens, job.request_id, done.error().what);
      return outcome;
    }
    outcome.tokens_loaded += item.num_tokens;
  }
  return outcome;
}

std::optional<std::string> WorkerNode::take_report() {
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
  if (impl_->pulls) impl_->pulls->shutdown();
  if (impl_->transport) impl_->transport->shutdown();
}

}  // namespace kvferry
