// Measures transfers between the memory of two processes on one GPU, in GB/s, beside a cudaMemcpy within one process.
//
// The figures are medians of kRounds pulls each, which take turns. 128 MiB are 1024 tokens of Llama-3.1-8B, 1 GiB are
// 8192. Ranges of 16 KiB are paged blocks, and chunks of 32 MiB lie in frames of GPU memory. A pull's time is that from
// submit() to the completion, including the notification. The first argument, if any, names the only backend to
// measure.
#include <cuda_runtime.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <string_view>
#include <vector>

#include "tests/gpu/device_cache.h"
#include "tests/gpu/gpu_pair.h"
#include "transport/base/check.h"

namespace kvferry {
namespace {

constexpr int kRounds = 15;
constexpr std::chrono::seconds kTimeLimit{5};  // for the rounds of one backend and size

double seconds(const std::function<void()>& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

double median(std::vector<double>& values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

std::vector<CopyRange> chunks_of(std::uint64_t bytes, std::uint64_t chunk_bytes) {
  std::vector<CopyRange> chunks;
  for (std::uint64_t at = 0; at < bytes; at += chunk_bytes) chunks.push_back({at, at, chunk_bytes});
  return chunks;
}

void bench(const char* backend, std::uint64_t bytes) {
  Result<std::unique_ptr<GpuPair>> started = GpuPair::start(backend, bytes);
  if (!started) return fmt::print("{:<8} left out: {}\n", backend, started.error().what);
  GpuPair& pair = **started;
  const DeviceBytes from(bytes), to(bytes);
  const std::vector<CopyRange> shapes[] = {{{0, 0, bytes}},
                                           chunks_of(bytes, 32 << 20),
                                           shuffled_blocks(bytes, 32 << 10, 2),
                                           shuffled_blocks(bytes, 16 << 10, 1),
                                           {{0, 0, 64}}};
  std::vector<double> copies, pulls[std::size(shapes)];
  const auto begin = std::chrono::steady_clock::now();
  for (int round = -2; round < kRounds; ++round) {
    if (round > 0 && std::chrono::steady_clock::now() - begin > kTimeLimit) break;
    const double copy = seconds([&] {
      cudaMemcpyAsync(to.data(), from.data(), bytes, cudaMemcpyDeviceToDevice);
      cudaStreamSynchronize(nullptr);
    });
    if (round >= 0) copies.push_back(copy);
    for (std::size_t i = 0; i < std::size(shapes); ++i) {
      std::vector<CopyRange> ranges = shapes[i];
      const double pull = seconds([&] {
        const Completion done = pair.move(Direction::kPull, std::move(ranges), {}, "done");
        KVFERRY_CHECK(done.code == ErrorCode::kOk, "{}", done.what);
      });
      if (round >= 0) pulls[i].push_back(pull);
    }
  }
  const double copy = median(copies);
  fmt::print("{:<8} {:>5} {:>7.0f}", backend, bytes >> 20, static_cast<double>(bytes) / copy / 1e9);
  for (std::size_t i = 0; i + 1 < std::size(shapes); ++i) {
    const double pull = median(pulls[i]);
    fmt::print(" {:>7.0f} {:>3.0f} %", static_cast<double>(bytes) / pull / 1e9, 100 * copy / pull);
  }
  fmt::print(" {:>9.0f}\n", median(pulls[4]) * 1e6);
  std::fflush(stdout);
}

}  // namespace
}  // namespace kvferry

int main(int argc, char** argv) {
  using namespace kvferry;
  if (const std::string why = why_no_gpu(); !why.empty()) {
    fmt::print(stderr, "gpu_transfer_bench: needs a GPU: {}\n", why);
    return 77;
  }
  fmt::print("{:<8} {:>5} {:>7} {:>13} {:>13} {:>13} {:>13} {:>9}\n", "", "MiB", "memcpy", "one range", "32 MiB",
             "32 KiB", "16 KiB", "64 B, us");
  for (const char* const backend : {"gpu_ipc", "ucx"}) {
    if (argc > 1 && std::string_view(argv[1]) != backend) continue;
    for (const std::uint64_t mib : {128, 1024}) bench(backend, mib << 20);
  }
  return 0;
}
