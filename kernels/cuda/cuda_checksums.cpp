#include "kernels/cuda/cuda_checksums.h"

#include <algorithm>
#include <cstdint>
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
    // The device may still write to the buffer in host memory, so the destructor first waits for the kernels. It does
    // not wait for later work of the stream, which may belong to a transfer whose peer has died. If start() failed,
    // there may be no recorded event; then it waits for the whole stream.
    if (host_.data() != nullptr) is_recorded_ ? cudaEventSynchronize(done_.get()) : cudaStreamSynchronize(stream_);
    pinned_.give_back(std::move(host_));
    done_.reset();
  }

  /// The device writes the hashes of all ranges' segments straight into pinned host memory.
  Result<void> start(std::span<const std::span<const std::byte>> ranges, cudaStream_t stream) {
    stream_ = stream;
    std::uint64_t segments = 0;
    for (const auto& range : ranges) {
      range_bytes_.push_back(range.size());
      segments += num_segments(range.size());
    }
    done_ = KVFERRY_TRY(make_event());
    if (segments > 0) {
      host_ = KVFERRY_TRY(pinned_.take(segments * sizeof(std::uint64_t)));
      KVFERRY_TRY(launch(ranges));
    }
    KVFERRY_TRY(cuda_result(cudaEventRecord(done_.get(), stream),
                            "cannot record a CUDA event after the checksums of GPU memory"));
    is_recorded_ = true;
    return {};
  }

  Result<bool> is_done() override {
    const CurrentDevice current(ordinal_);
    return is_event_reached(done_.get(), "cannot ask CUDA whether the checksums of GPU memory are done");
  }

  Result<std::vector<std::uint64_t>> take() override {
    const CurrentDevice current(ordinal_);
    KVFERRY_TRY(cuda_result(cudaEventSynchronize(done_.get()), "cannot wait for the checksums of GPU memory"));
    return checksums_of(range_bytes_, host_.data());
  }

 private:
  Result<void> launch(std::span<const std::span<const std::byte>> ranges) {
    auto* segments = reinterpret_cast<std::uint64_t*>(host_.data());
    cuda::HashJobs batch;
    for (std::size_t i = 0; i < ranges.size(); ++i) {
      batch.jobs[batch.num_jobs++] = {ranges[i].data(), ranges[i].size(), segments};
      segments += num_segments(ranges[i].size());
      if (batch.num_jobs < cuda::HashJobs::kMax && i + 1 < ranges.size()) continue;
      KVFERRY_TRY(cuda_result(cuda::launch_hash(batch, device::segment_secret(), stream_),
                              "cannot launch the CUDA kernel for checksums of GPU memory"));
      batch.num_jobs = 0;
    }
    return {};
  }

  PinnedPool& pinned_;
  const int ordinal_;
  cudaStream_t stream_ = nullptr;
  std::vector<std::uint64_t> range_bytes_;
  PinnedBuffer host_;
  Event done_;
  bool is_recorded_ = false;  // true once done_ is recorded after the last kernel
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
