#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
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

  int ordinal = 0;  // number of the GPU
  KvLayout layout;
  ChunkFormat format;
  ChunkShape shape;
  device::HostPlan host_plan;
  bool is_vectorisable = false;
  std::unique_ptr<device::PlaneView, FreeBy<cudaFree>> planes;  // host_plan.planes in GPU memory, for the kernels
  device::SegmentSecret secret{};
  mutable PinnedPool pinned;
};

/// Offsets of a pass's data in its buffer, the same on the host and on the device.
struct PassLayout {
  std::size_t jobs = 0, hash_jobs = 0, tables = 0, segments = 0, end = 0;
};

class CudaPass final : public StreamPacker::Pass {
 public:
  CudaPass(std::shared_ptr<const PackerState> state, cudaStream_t stream, bool gathers, bool wants_checksums)
      : state_(std::move(state)), stream_(stream), gathers_(gathers), wants_checksums_(wants_checksums) {}
  ~CudaPass() override {
    const CurrentDevice current(state_->ordinal);
    // The device may still read the host's buffer; the device's buffer is freed in the order of the stream.
    if (is_finished_)
      cudaEventSynchronize(done_.get());
    else if (host_.data() != nullptr)
      cudaStreamSynchronize(stream_);
    state_->pinned.give_back(std::move(host_));
    device_.free();
    done_.reset();
  }

  /// Sends jobs and block tables to the device.
  Result<void> start(std::span<const PackerJob> jobs) {
    const CurrentDevice current(state_->ordinal);
    const PassLayout layout = lay_out(jobs);
    host_ = KVFERRY_TRY(state_->pinned.take(layout.end));
    KVFERRY_TRY(device_.allocate(layout.end, state_->ordinal, stream_));
    done_ = KVFERRY_TRY(make_event());
    layout_ = layout;
    fill(jobs);
    return cuda_result(cudaMemcpyAsync(device_.data(), host_.data(), layout_.segments, cudaMemcpyHostToDevice, stream_),
                       "starting a gather or scatter of KV");
  }

  Result<void> copy_layers(std::uint32_t first, std::uint32_t end) override {
    const CurrentDevice current(state_->ordinal);
    if (first != next_layer_ || end <= first || end > launch_.plan.num_layers)
      return Error{ErrorCode::kInvalidArgument,
                   fmt::format("layers [{}, {}) are out of order: {} of {} layers are copied", first, end, next_layer_,
                               launch_.plan.num_layers)};
    next_layer_ = end;
    launch_.layers = {first, end};
    const ElementType cache = state_->format.cache_type, chunk = state_->format.chunk_type;
    cudaError_t code;
    if (!by_segments_)
      code = cuda::launch_elements(launch_, cache, chunk, gathers_, stream_);
    else if (gathers_)
      code = cuda::launch_gather(launch_, cache, chunk, wants_checksums_, stream_);
    else
      code = cuda::launch_scatter(launch_, cache, chunk, hashes_while_scattering(), stream_);
    if (hashes_while_scattering()) are_hashed_ = true;
    return cuda_result(code, "launching a copy of KV");
  }

  Result<void> finish() override {
    const CurrentDevice current(state_->ordinal);
    if (next_layer_ != launch_.plan.num_layers)
      return Error{ErrorCode::kInvalidArgument,
                   fmt::format("finish() was called after {} of {} layers; copy all layers first", next_layer_,
                               launch_.plan.num_layers)};
    if (wants_checksums_) {
      const bool are_hashed = gathers_ ? by_segments_ : are_hashed_;
      if (!are_hashed) {
        const auto* const jobs = reinterpret_cast<const cuda::HashJob*>(device_.data() + layout_.hash_jobs);
        const cudaError_t code =
            cuda::launch_hash(jobs, launch_.num_jobs, chunk_segments_max_, state_->secret, stream_);
        KVFERRY_TRY(cuda_result(code, "launching a checksum"));
      }
      const cudaError_t code = cudaMemcpyAsync(host_.data() + layout_.segments, device_.data() + layout_.segments,
                                               layout_.end - layout_.segments, cudaMemcpyDeviceToHost, stream_);
      KVFERRY_TRY(cuda_result(code, "fetching checksums"));
    }
    is_finished_ = true;
    return cuda_result(cudaEventRecord(done_.get(), stream_), "recording the end of a gather or scatter of KV");
  }

  Result<bool> is_done() const override {
    const CurrentDevice current(state_->ordinal);
    if (!is_finished_) return false;
    return is_event_reached(done_.get(), "checking whether a gather or scatter of KV has ended");
  }

  Result<std::vector<std::uint64_t>> wait() override {
    const CurrentDevice current(state_->ordinal);
    if (!is_finished_) return Error{ErrorCode::kInvalidArgument, "wait() was called before finish()"};
    KVFERRY_TRY(cuda_result(cudaEventSynchronize(done_.get()), "waiting for a gather or scatter of KV"));
    if (!wants_checksums_) return std::vector<std::uint64_t>{};
    return checksums_of(chunk_bytes_, host_.data() + layout_.segments);
  }

 private:
  PassLayout lay_out(std::span<const PackerJob> jobs) {
    const auto after = [](std::size_t at, std::size_t bytes) {
      return (at + bytes + kVecBytes - 1) / kVecBytes * kVecBytes;
    };
    std::size_t table_entries = 0;
    std::uint64_t segments = 0;
    for (const PackerJob& job : jobs) {
      table_entries += job.run.block_ids.size() * table_blocks(job);
      chunk_bytes_.push_back(job.chunk_tokens * state_->shape.bytes_per_token);
      segments += num_segments(chunk_bytes_.back());
    }
    PassLayout layout;
    layout.hash_jobs = after(layout.jobs, jobs.size() * sizeof(device::PackJob));
    layout.tables = after(layout.hash_jobs, jobs.size() * sizeof(cuda::HashJob));
    layout.segments = after(layout.tables, table_entries * sizeof(BlockId));
    layout.end = after(layout.segments, wants_checksums_ ? segments * sizeof(std::uint64_t) : 0);
    return layout;
  }

  static std::size_t table_blocks(const PackerJob& job) {
    std::size_t blocks = 0;
    for (const std::vector<BlockId>& table : job.run.block_ids) blocks = std::max(blocks, table.size());
    return blocks;
  }

  void fill(std::span<const PackerJob> jobs) {
    const device::PackPlan& plan = state_->host_plan.plan;
    launch_.plan = plan;
    launch_.plan.planes = state_->planes.get();
    launch_.jobs = reinterpret_cast<const device::PackJob*>(device_.data() + layout_.jobs);
    launch_.num_jobs = static_cast<std::uint32_t>(jobs.size());
    launch_.secret = state_->secret;
    by_segments_ = state_->is_vectorisable;
    std::size_t table_at = layout_.tables, segments_at = layout_.segments;
    for (std::size_t i = 0; i < jobs.size(); ++i) {
      const PackerJob& job = jobs[i];
      const std::size_t blocks = table_blocks(job);
      auto* const segments =
          wants_checksums_ ? reinterpret_cast<std::uint64_t*>(device_.data() + segments_at) : nullptr;
      const device::PackJob packed{job.chunk,
                                   reinterpret_cast<const std::int32_t*>(device_.data() + table_at),
                                   static_cast<std::uint32_t>(blocks),
                                   job.run.first_token,
                                   job.run.num_tokens,
                                   job.chunk_tokens,
                                   job.skip_tokens,
                                   segments};
      std::memcpy(host_.data() + layout_.jobs + i * sizeof packed, &packed, sizeof packed);
      const cuda::HashJob hashed{job.chunk, chunk_bytes_[i], segments};
      std::memcpy(host_.data() + layout_.hash_jobs + i * sizeof hashed, &hashed, sizeof hashed);
      for (const std::vector<BlockId>& table : job.run.block_ids) {
        auto* const entries = reinterpret_cast<BlockId*>(host_.data() + table_at);
        std::fill(std::copy(table.begin(), table.end(), entries), entries + blocks, kNoBlock);
        table_at += blocks * sizeof(BlockId);
      }
      if (wants_checksums_) segments_at += num_segments(chunk_bytes_[i]) * sizeof(std::uint64_t);
      const std::uint64_t run_bytes = plan.num_layers * plan.layer_bytes(job.run.num_tokens);
      launch_.run_segments_max = std::max(launch_.run_segments_max, num_segments(run_bytes));
      launch_.run_elements_max = std::max(launch_.run_elements_max, run_bytes / plan.chunk_element_bytes);
      chunk_segments_max_ = std::max(chunk_segments_max_, num_segments(chunk_bytes_[i]));
      by_segments_ = by_segments_ && reinterpret_cast<std::uintptr_t>(job.chunk) % kVecBytes == 0;
      runs_are_chunks_ = runs_are_chunks_ && job.run.num_tokens == job.chunk_tokens && state_->shape.is_whole();
    }
  }

  bool hashes_while_scattering() const {
    const bool takes_all = launch_.layers.first == 0 && launch_.layers.end == launch_.plan.num_layers;
    return wants_checksums_ && !gathers_ && by_segments_ && runs_are_chunks_ && takes_all;
  }

  const std::shared_ptr<const PackerState> state_;
  const cudaStream_t stream_;
  const bool gathers_, wants_checksums_;
  PassLayout layout_;
  PinnedBuffer host_;
  StreamBuffer device_;
  Event done_;
  cuda::Launch launch_{};
  std::vector<std::uint64_t> chunk_bytes_;
  std::uint64_t chunk_segments_max_ = 0;
  std::uint32_t next_layer_ = 0;
  bool by_segments_ = false, runs_are_chunks_ = true, are_hashed_ = false, is_finished_ = false;
};

class CudaPackerImpl final : public StreamPacker {
 public:
  explicit CudaPackerImpl(std::shared_ptr<const PackerState> state) : state_(std::move(state)) {}
  const KvLayout& layout() const override { return state_->layout; }
  std::uint64_t chunk_bytes_per_token() const override { return state_->shape.bytes_per_token; }

  Result<std::unique_ptr<Pass>> gather(std::span<const PackerJob> jobs, DeviceStream stream,
                                       bool wants_checksums) override {
    for (const PackerJob& job : jobs) {
      if (job.chunk_tokens != job.run.num_tokens || job.skip_tokens != 0)
        return Error{
            ErrorCode::kInvalidArgument,
            fmt::format("a gather must copy all {} tokens of a chunk, but the job has {} tokens from token {} on",
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
      return Error{ErrorCode::kInvalidArgument,
                   fmt::format("a pass has {} jobs; 1 to {} are allowed", jobs.size(), cuda::kJobsMax)};
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
  KVFERRY_TRY(cuda_result(cudaGetDeviceCount(&num_devices), "counting GPUs"));
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
  KVFERRY_TRY(cuda_result(cudaMalloc(&on_device, bytes), "allocating GPU memory"));
  state->planes.reset(static_cast<device::PlaneView*>(on_device));
  KVFERRY_TRY(cuda_result(cudaMemcpy(on_device, planes.data(), bytes, cudaMemcpyHostToDevice), "copying to the GPU"));
  return std::unique_ptr<StreamPacker>(std::make_unique<CudaPackerImpl>(std::move(state)));
}

}  // namespace kvferry
