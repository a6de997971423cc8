#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <utility>

#include "kernels/chunk_shape.h"
#include "kernels/cuda/cuda_checksums.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/cuda_memory.h"
#include "kernels/cuda/current_device.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/pinned_pool.h"
#include "kernels/device_plan.h"

namespace kvferry {
namespace {

using device::kVecBytes;

/// State that all passes of a packer share.
struct PackerState {
  PackerState() = default;
  PackerState(const PackerState&) = delete;
  PackerState& operator=(const PackerState&) = delete;
  ~PackerState() {
    const CurrentDevice current(ordinal);
    planes.reset();
    pinned.clear();
  }

  int ordinal = 0;  // CUDA's number of the GPU
  KvLayout layout;
  ChunkFormat format;
  ChunkShape shape;
  device::HostPlan host_plan;
  bool is_vectorisable = false;
  std::unique_ptr<device::PlaneView, FreeBy<cudaFree>> planes;  // host_plan.planes in GPU memory, for the kernels
  device::SegmentSecret secret{};
  mutable PinnedPool pinned;
};

class CudaPass final : public StreamPacker::Pass {
 public:
  CudaPass(std::shared_ptr<const PackerState> state, cudaStream_t stream, bool gathers, bool wants_checksums)
      : state_(std::move(state)), stream_(stream), gathers_(gathers), wants_checksums_(wants_checksums) {}
  ~CudaPass() override {
    const CurrentDevice current(state_->ordinal);
    // The destructor waits first, because the device may still access the buffer in host memory.
    if (is_finished_)
      cudaEventSynchronize(done_.get());
    else if (host_.data() != nullptr && next_layer_ > 0)
      cudaStreamSynchronize(stream_);
    state_->pinned.give_back(std::move(host_));
    done_.reset();
  }

  /// Prepares the launches. Nothing is given to the device yet.
  Result<void> start(std::span<const PackerJob> jobs) {
    const CurrentDevice current(state_->ordinal);
    const HostLayout layout = lay_out(jobs);
    if (layout.end > 0) host_ = KVFERRY_TRY(state_->pinned.take(layout.end));
    done_ = KVFERRY_TRY(make_event());
    fill(jobs, layout);
    return {};
  }

  Result<void> copy_layers(std::uint32_t first, std::uint32_t end) override {
    const CurrentDevice current(state_->ordinal);
    if (first != next_layer_ || end <= first || end > launch_.plan.num_layers)
      return Error{
          ErrorCode::kInvalidArgument,
          fmt::format(
              "layers [{}, {}) can't be copied now: {} of {} layers are copied, and the next ones must follow in order",
              first, end, next_layer_, launch_.plan.num_layers)};
    next_layer_ = end;
    launch_.layers = {first, end};
    for (const cuda::PackJobs& batch : batches_)
      KVFERRY_TRY(cuda_result(copy(batch), "cannot launch the CUDA kernel that copies KV"));
    if (hashes_while_scattering()) are_hashed_ = true;
    return {};
  }

  Result<void> finish() override {
    const CurrentDevice current(state_->ordinal);
    if (next_layer_ != launch_.plan.num_layers)
      return Error{
          ErrorCode::kInvalidArgument,
          fmt::format("a gather or scatter of KV can't be finished after {} of {} layers; copy all layers first",
                      next_layer_, launch_.plan.num_layers)};
    if (wants_checksums_ && !(gathers_ ? hashes_while_gathering() : are_hashed_)) {
      for (const cuda::HashJobs& batch : hashes_)
        KVFERRY_TRY(cuda_result(cuda::launch_hash(batch, state_->secret, stream_),
                                "cannot launch the CUDA kernel for checksums of KV"));
    }
    KVFERRY_TRY(cuda_result(cudaEventRecord(done_.get(), stream_),
                            "cannot record a CUDA event after a gather or scatter of KV"));
    is_finished_ = true;
    return {};
  }

  Result<bool> is_done() const override {
    const CurrentDevice current(state_->ordinal);
    if (!is_finished_) return false;
    return is_event_reached(done_.get(), "cannot check whether a gather or scatter of KV has ended");
  }

  Result<std::vector<std::uint64_t>> wait() override {
    const CurrentDevice current(state_->ordinal);
    if (!is_finished_)
      return Error{ErrorCode::kInvalidArgument, "wait() was called for a gather or scatter of KV before finish()"};
    KVFERRY_TRY(cuda_result(cudaEventSynchronize(done_.get()), "cannot wait for a gather or scatter of KV"));
    if (!wants_checksums_) return std::vector<std::uint64_t>{};
    return checksums_of(hashed_bytes_, host_.data());
  }

 private:
  /// Offsets in the pass's buffer in host memory: the hashes of all chunks' segments are at its start.
  struct HostLayout {
    std::size_t tables = 0;  // start of the tables that are too large for a launch's parameters
    std::size_t end = 0;
  };
  HostLayout lay_out(std::span<const PackerJob> jobs) {
    HostLayout layout;
    std::size_t entries = 0;
    for (const PackerJob& job : jobs) {
      hashed_bytes_.push_back(hashed_by(job).size());
      if (wants_checksums_) layout.tables += num_segments(hashed_bytes_.back()) * sizeof(std::uint64_t);
      const std::size_t own = blocks_of(job).count * job.run.block_ids.size();
      if (!cuda::PackJobs::can_hold(own)) entries += own;
    }
    layout.end = layout.tables + entries * sizeof(BlockId);
    return layout;
  }

  std::span<const std::byte> hashed_by(const PackerJob& job) const {
    return job.hashed.empty() ? std::span(job.chunk, job.chunk_tokens * state_->shape.bytes_per_token) : job.hashed;
  }

  /// The blocks that a job's tokens are in, as positions in its tables.
  struct Blocks {
    std::uint32_t first = 0, count = 0;
  };
  Blocks blocks_of(const PackerJob& job) const {
    const std::uint32_t block_tokens = state_->host_plan.plan.block_tokens, first = job.run.first_token / block_tokens;
    if (job.run.num_tokens == 0) return {first, 0};
    return {first, (job.run.first_token + job.run.num_tokens - 1) / block_tokens - first + 1};
  }

  void fill(std::span<const PackerJob> jobs, const HostLayout& layout) {
    const device::PackPlan& plan = state_->host_plan.plan;
    launch_.plan = plan;
    launch_.plan.planes = state_->planes.get();
    launch_.secret = state_->secret;
    by_segments_ = state_->is_vectorisable;
    auto* segments = reinterpret_cast<std::uint64_t*>(host_.data());
    std::byte* large_table = host_.data() + layout.tables;
    std::vector<BlockId> table;
    for (std::size_t i = 0; i < jobs.size(); ++i) {
      const PackerJob& job = jobs[i];
      const Blocks blocks = blocks_of(job);
      table.clear();
      for (const std::vector<BlockId>& ids : job.run.block_ids) {
        const auto from = std::min<std::size_t>(blocks.first, ids.size());
        const auto to = std::min<std::size_t>(blocks.first + blocks.count, ids.size());
        table.insert(table.end(), ids.begin() + from, ids.begin() + to);
        table.resize(table.size() + blocks.count - (to - from), kNoBlock);
      }
      device::PackJob packed{
          job.chunk,          nullptr,          blocks.count,    job.run.first_token - blocks.first * plan.block_tokens,
          job.run.num_tokens, job.chunk_tokens, job.skip_tokens, wants_checksums_ ? segments : nullptr};
      if (!cuda::PackJobs::can_hold(table.size())) {
        packed.tables = reinterpret_cast<const std::int32_t*>(large_table);
        std::memcpy(large_table, table.data(), table.size() * sizeof(BlockId));
        large_table += table.size() * sizeof(BlockId);
      }
      const bool in_host_memory = job.memory == MemoryKind::kPinned;
      if (batches_.empty() || batches_.back().in_host_memory() != in_host_memory || !batches_.back().add(packed, table))
        batches_.emplace_back(in_host_memory).add(packed, table);
      if (wants_checksums_) {
        if (hashes_.empty() || hashes_.back().in_host_memory != in_host_memory ||
            hashes_.back().num_jobs == cuda::HashJobs::kMax)
          hashes_.emplace_back().in_host_memory = in_host_memory;
        hashes_.back().jobs[hashes_.back().num_jobs++] = {hashed_by(job).data(), hashed_bytes_[i], segments};
        segments += num_segments(hashed_bytes_[i]);
      }
      const std::uint64_t run_bytes = plan.num_layers * plan.layer_bytes(job.run.num_tokens);
      launch_.run_segments_max = std::max(launch_.run_segments_max, num_segments(run_bytes));
      launch_.run_elements_max = std::max(launch_.run_elements_max, run_bytes / plan.chunk_element_bytes);
      by_segments_ = by_segments_ && reinterpret_cast<std::uintptr_t>(job.chunk) % kVecBytes == 0;
      hashes_chunks_ = hashes_chunks_ && job.hashed.empty();
      runs_are_chunks_ = runs_are_chunks_ && job.run.num_tokens == job.chunk_tokens && state_->shape.is_whole();
    }
  }

  cudaError_t copy(const cuda::PackJobs& batch) const {
    const ElementType cache = state_->format.cache_type, chunk = state_->format.chunk_type;
    if (!by_segments_) return cuda::launch_elements(launch_, batch, cache, chunk, gathers_, stream_);
    if (gathers_) return cuda::launch_gather(launch_, batch, cache, chunk, hashes_while_gathering(), stream_);
    return cuda::launch_scatter(launch_, batch, cache, chunk, hashes_while_scattering(), stream_);
  }

  bool hashes_while_gathering() const { return wants_checksums_ && by_segments_ && hashes_chunks_; }
  bool hashes_while_scattering() const {
    const bool takes_all = launch_.layers.first == 0 && launch_.layers.end == launch_.plan.num_layers;
    return wants_checksums_ && !gathers_ && by_segments_ && hashes_chunks_ && runs_are_chunks_ && takes_all;
  }

  const std::shared_ptr<const PackerState> state_;
  const cudaStream_t stream_;
  const bool gathers_, wants_checksums_;
  PinnedBuffer host_;
  Event done_;
  cuda::Launch launch_{};
  std::deque<cuda::PackJobs> batches_;
  std::deque<cuda::HashJobs> hashes_;
  std::vector<std::uint64_t> hashed_bytes_;  // [job] number of bytes that the checksum covers
  std::uint32_t next_layer_ = 0;
  bool by_segments_ = false, hashes_chunks_ = true, runs_are_chunks_ = true, are_hashed_ = false, is_finished_ = false;
};

class CudaPackerImpl final : public StreamPacker {
 public:
  explicit CudaPackerImpl(std::shared_ptr<const PackerState> state) : state_(std::move(state)) {}
  std::uint32_t num_layers() const override { return state_->host_plan.plan.num_layers; }
  std::uint64_t chunk_bytes_per_token() const override { return state_->shape.bytes_per_token; }

  Result<std::unique_ptr<Pass>> gather(std::span<const PackerJob> jobs, DeviceStream stream,
                                       bool wants_checksums) override {
    for (const PackerJob& job : jobs) {
      if (job.chunk_tokens != job.run.num_tokens || job.skip_tokens != 0)
        return Error{
            ErrorCode::kInvalidArgument,
            fmt::format("a gather must copy all {} tokens of a chunk, but {} tokens from token {} on were given",
                        job.chunk_tokens, job.run.num_tokens, job.skip_tokens)};
      KVFERRY_TRY(check_gather(state_->layout, state_->shape, job.run, job.chunk_bytes));
    }
    return start(jobs, stream, true, wants_checksums);
  }

  Result<std::unique_ptr<Pass>> scatter(std::span<const PackerJob> jobs, DeviceStream stream,
                                        bool wants_checksums) override {
    for (const PackerJob& job : jobs) {
      KVFERRY_TRY(
          check_scatter(state_->layout, state_->shape, job.run, job.chunk_bytes, job.chunk_tokens, job.skip_tokens));
    }
    return start(jobs, stream, false, wants_checksums);
  }

 private:
  Result<std::unique_ptr<Pass>> start(std::span<const PackerJob> jobs, DeviceStream stream, bool gathers,
                                      bool wants_checksums) {
    if (jobs.empty() || jobs.size() > cuda::kJobsMax)
      return Error{
          ErrorCode::kInvalidArgument,
          fmt::format("a gather or scatter of KV has {} chunks; 1 to {} are allowed", jobs.size(), cuda::kJobsMax)};
    auto pass = std::make_unique<CudaPass>(state_, static_cast<cudaStream_t>(stream), gathers, wants_checksums);
    KVFERRY_TRY(pass->start(jobs));
    return std::unique_ptr<Pass>(std::move(pass));
  }

  const std::shared_ptr<const PackerState> state_;
};

}  // namespace

Result<std::unique_ptr<StreamPacker>> make_cuda_packer(int ordinal, KvLayout layout, ChunkFormat format) {
  KVFERRY_TRY(check_layout(layout));
  const ChunkShape shape = KVFERRY_TRY(resolve(layout, format));
  int num_devices = 0;
  KVFERRY_TRY(cuda_result(cudaGetDeviceCount(&num_devices), "cannot count the GPUs"));
  const CurrentDevice current(ordinal);
  auto state = std::make_shared<PackerState>();
  state->ordinal = ordinal;
  state->layout = std::move(layout);
  state->format = std::move(format);
  state->shape = shape;
  state->host_plan = device::make_plan(state->layout, state->format, state->shape);
  state->is_vectorisable = device::is_vectorisable(state->host_plan);
  state->secret = device::segment_secret();
  const std::vector<device::PlaneView>& planes = state->host_plan.planes;
  const std::size_t bytes = planes.size() * sizeof planes[0];
  void* on_device = nullptr;
  KVFERRY_TRY(cuda_result(cudaMalloc(&on_device, bytes), "cannot allocate GPU memory for the KV layout"));
  state->planes.reset(static_cast<device::PlaneView*>(on_device));
  KVFERRY_TRY(cuda_result(cudaMemcpy(on_device, planes.data(), bytes, cudaMemcpyHostToDevice),
                          "cannot copy the KV layout to the GPU"));
  return std::unique_ptr<StreamPacker>(std::make_unique<CudaPackerImpl>(std::move(state)));
}

}  // namespace kvferry
