#include "kernels/cuda/cuda_checksums.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "kernels/cuda/cuda_result.h"
#include "kernels/cuda/current_device.h"
#include "kernels/cuda/launch.h"
#include "transport/base/checksum.h"

namespace kvferry {
namespace {

std::uint64_t num_segments(std::uint64_t bytes) { return (bytes + kSegmentBytes - 1) / kSegmentBytes; }

class CudaChecksums final : public Device::Checksums {
 public:
  CudaChecksums(PinnedPool& pinned, int ordinal) : pinned_(pinned), ordinal_(ordinal) {}
  ~CudaChecksums() override {
    const CurrentDevice current(ordinal_);
    if (host_.data() != nullptr) cudaStreamSynchronize(stream_);  // the device may still access the host's buffer
    pinned_.give_back(std::move(host_));
  }

  /// Host and device have the same buffer: jobs, then the segments of all ranges.
  Result<void> start(std::span<const std::span<const std::byte>> ranges, cudaStream_t stream) {
    stream_ = stream;
    std::uint64_t segments = 0, segments_max = 0;
    for (const auto& range : ranges) {
      range_bytes_.push_back(range.size());
      segments += num_segments(range.size());
      segments_max = std::max(segments_max, num_segments(range.size()));
    }
    segments_at_ = ranges.size() * sizeof(cuda::HashJob);
    const std::size_t bytes = segments_at_ + segments * sizeof(std::uint64_t);
    if (Result<void> ok = done_.create(); !ok) return ok;
    if (segments > 0) {
      Result<PinnedBuffer> host = pinned_.take(bytes);
      if (!host) return std::move(host).error();
      if (Result<void> ok = device_.allocate(bytes, stream); !ok) return ok;
      host_ = std::move(*host);
      if (Result<void> ok = launch(ranges, bytes, segments_max); !ok) return ok;
    }
    return cuda_result(cudaEventRecord(done_.get(), stream), "recording the end of checksums");
  }

  Result<bool> is_done() override {
    const CurrentDevice current(ordinal_);
    const cudaError_t code = cudaEventQuery(done_.get());
    if (code == cudaErrorNotReady) return false;
    if (Result<void> ok = cuda_result(code, "querying checksums"); !ok) return std::move(ok).error();
    return true;
  }

  Result<std::vector<std::uint64_t>> take() override {
    const CurrentDevice current(ordinal_);
    if (Result<void> ok = cuda_result(cudaEventSynchronize(done_.get()), "waiting for checksums"); !ok)
      return std::move(ok).error();
    std::vector<std::uint64_t> checksums;
    const auto* segments = reinterpret_cast<const std::uint64_t*>(host_.data() + segments_at_);
    for (const std::uint64_t bytes : range_bytes_) {
      checksums.push_back(checksum_of_segments({segments, num_segments(bytes)}, bytes));
      segments += num_segments(bytes);
    }
    return checksums;
  }

 private:
  Result<void> launch(std::span<const std::span<const std::byte>> ranges, std::size_t bytes,
                      std::uint64_t segments_max) {
    auto* segments = reinterpret_cast<std::uint64_t*>(device_.data() + segments_at_);
    std::byte* job_at = host_.data();
    for (const auto& range : ranges) {
      const cuda::HashJob job{range.data(), range.size(), segments};
      std::memcpy(job_at, &job, sizeof job);
      job_at += sizeof job;
      segments += num_segments(range.size());
    }
    cudaError_t code = cudaMemcpyAsync(device_.data(), host_.data(), segments_at_, cudaMemcpyHostToDevice, stream_);
    const auto* const jobs = reinterpret_cast<const cuda::HashJob*>(device_.data());
    for (std::size_t first = 0; first < ranges.size() && code == cudaSuccess; first += cuda::kJobsMax) {
      const auto count = static_cast<std::uint32_t>(std::min<std::size_t>(ranges.size() - first, cuda::kJobsMax));
      code = cuda::launch_hash(jobs + first, count, segments_max, device::segment_secret(), stream_);
    }
    if (Result<void> ok = cuda_result(code, "launching checksums"); !ok) return ok;
    return cuda_result(cudaMemcpyAsync(host_.data() + segments_at_, device_.data() + segments_at_, bytes - segments_at_,
                                       cudaMemcpyDeviceToHost, stream_),
                       "fetching checksums");
  }

  PinnedPool& pinned_;
  const int ordinal_;
  cudaStream_t stream_ = nullptr;
  std::vector<std::uint64_t> range_bytes_;
  std::size_t segments_at_ = 0;
  PinnedBuffer host_;
  StreamBuffer device_;
  Event done_;
};

}  // namespace

Result<std::unique_ptr<Device::Checksums>> start_cuda_checksums(PinnedPool& pinned, int ordinal,
                                                                std::span<const std::span<const std::byte>> ranges,
                                                                cudaStream_t stream) {
  auto checksums = std::make_unique<CudaChecksums>(pinned, ordinal);
  if (Result<void> ok = checksums->start(ranges, stream); !ok) return std::move(ok).error();
  return std::unique_ptr<Device::Checksums>(std::move(checksums));
}

}  // namespace kvferry
