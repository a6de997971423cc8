#include "kernels/cuda/cuda_checksums.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "kernels/cuda/current_device.h"
#include "kernels/cuda/launch.h"

namespace kvferry {
namespace {

class CudaChecksums final : public Device::Checksums {
 public:
  CudaChecksums(PinnedPool& pinned, int ordinal) : pinned_(pinned), ordinal_(ordinal) {}
  ~CudaChecksums() override {
    const CurrentDevice current(ordinal_);
    // The device may still access the host's buffer.
    if (host_.data() != nullptr) cudaStreamSynchronize(stream_);
    pinned_.give_back(std::move(host_));
    device_.free();
    done_.reset();
  }

  /// The host's and the device's buffer have the same layout: jobs, then the hashes of all ranges' segments.
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
    done_ = KVFERRY_TRY(make_event());
    if (segments > 0) {
      PinnedBuffer host = KVFERRY_TRY(pinned_.take(bytes));
      KVFERRY_TRY(device_.allocate(bytes, ordinal_, stream));
      host_ = std::move(host);
      KVFERRY_TRY(launch(ranges, bytes, segments_max));
    }
    return cuda_result(cudaEventRecord(done_.get(), stream), "recording the end of checksums");
  }

  Result<bool> is_done() override {
    const CurrentDevice current(ordinal_);
    return is_event_reached(done_.get(), "querying checksums");
  }

  Result<std::vector<std::uint64_t>> take() override {
    const CurrentDevice current(ordinal_);
    KVFERRY_TRY(cuda_result(cudaEventSynchronize(done_.get()), "waiting for checksums"));
    return checksums_of(range_bytes_, host_.data() + segments_at_);
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
    KVFERRY_TRY(cuda_result(code, "launching checksums"));
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
  KVFERRY_TRY(checksums->start(ranges, stream));
  return std::unique_ptr<Device::Checksums>(std::move(checksums));
}

std::vector<std::uint64_t> checksums_of(std::span<const std::uint64_t> range_bytes, const std::byte* segments) {
  std::vector<std::uint64_t> checksums;
  const auto* segment = reinterpret_cast<const std::uint64_t*>(segments);
  for (const std::uint64_t bytes : range_bytes) {
    checksums.push_back(checksum_of_segments({segment, num_segments(bytes)}, bytes));
    segment += num_segments(bytes);
  }
  return checksums;
}

}  // namespace kvferry
