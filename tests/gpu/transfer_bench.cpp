// Measures transfers between the memory of two processes on one GPU, in GB/s, paged and contiguous, beside a cudaMemcpy
// within one process.
//
// The figures are medians of kRounds pulls each, which take turns. A request is 1024 tokens of Llama-3.1-8B in blocks
// of 16 tokens: 128 MiB in ranges of 32 KiB (K or V of a layer). A request's overhead is the time from submit() to the
// completion, including the notification, minus the time of a copy of the same bytes within one process.
#include <cuda_runtime.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <vector>

#include "tests/gpu/device_cache.h"
#include "tests/gpu/gpu_pair.h"
#include "transport/base/check.h"

namespace kvferry {
namespace {

constexpr std::uint64_t kBytes = std::uint64_t{128} << 20;
constexpr int kRounds = 31;

double seconds(const std::function<void()>& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

double median(std::vector<double>& values) {
  std::nth_element(values.begin(), values.begin() + kRounds / 2, values.end());
  return values[kRounds / 2];
}

void bench(const char* backend) {
  Result<std::unique_ptr<GpuPair>> started = GpuPair::start(backend, kBytes);
  if (!started) return fmt::print("{:<8} left out: {}\n", backend, started.error().what);
  GpuPair& pair = **started;
  const DeviceBytes from(kBytes), to(kBytes);
  const auto pull = [&](const std::vector<CopyRange>& ranges) {
    const Completion done = pair.move(Direction::kPull, ranges, {}, "done");
    KVFERRY_CHECK(done.code == ErrorCode::kOk, "{}", done.what);
  };
  const std::vector<CopyRange> contiguous = {{0, 0, kBytes}}, blocks = shuffled_blocks(kBytes, 16 << 10, 1),
                               request = shuffled_blocks(kBytes, 32 << 10, 2), tiny = {{0, 0, 64}};
  const std::function<void()> works[] = {[&] {
                                           cudaMemcpyAsync(to.data(), from.data(), kBytes, cudaMemcpyDeviceToDevice);
                                           cudaStreamSynchronize(nullptr);
                                         },
                                         [&] { pull(contiguous); }, [&] { pull(blocks); }, [&] { pull(request); },
                                         [&] { pull(tiny); }};
  std::vector<double> times[std::size(works)];
  for (int round = -2; round < kRounds; ++round) {
    for (std::size_t i = 0; i < std::size(works); ++i) {
      const double time = seconds(works[i]);
      if (round >= 0) times[i].push_back(time);
    }
  }
  const double copy = median(times[0]), whole = median(times[1]), paged = median(times[2]), one = median(times[3]);
  fmt::print("{:<8} {:>8.0f} {:>11.0f} {:>11.0f} {:>5.0f} % {:>12.0f} {:>14.0f} {:>11.0f}\n", backend,
             kBytes / copy / 1e9, kBytes / whole / 1e9, kBytes / paged / 1e9, 100 * whole / paged, one * 1e6,
             (one - copy) * 1e6, median(times[4]) * 1e6);
}

}  // namespace
}  // namespace kvferry

int main() {
  using namespace kvferry;
  if (const std::string why = why_no_gpu(); !why.empty()) {
    fmt::print(stderr, "gpu_transfer_bench: needs a GPU: {}\n", why);
    return 77;
  }
  fmt::print("{:<8} {:>8} {:>11} {:>11} {:>7} {:>12} {:>14} {:>11}\n", "", "memcpy", "contiguous", "16 KiB", "of it",
             "request us", "overhead us", "64 bytes us");
  for (const char* const backend : {"gpu_ipc", "ucx"}) bench(backend);
  return 0;
}
