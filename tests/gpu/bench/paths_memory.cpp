// The sections of gpu_paths_bench about memory alone: copy engines, pinning, checksums.
#include <fmt/format.h>
#include <sys/mman.h>

#include <cstring>

#include "tests/gpu/bench/paths_bench.h"
#include "tests/gpu/bench/rival_kernels.h"
#include "transport/base/memory/large_memory.h"
#include "transport/shared_memory.h"

namespace kvferry {
namespace {

constexpr std::uint64_t kGiB = std::uint64_t{1} << 30;
constexpr int kRounds = 7;

/// Prints the seconds that pinning memory takes which has been written already, and the seconds to unpin it.
void pin(Device& device, const char* name, std::span<std::byte> memory) {
  std::memset(memory.data(), 1, memory.size());
  const double huge = 100.0 * static_cast<double>(huge_page_bytes(memory)) / static_cast<double>(memory.size());
  std::vector<double> in, out;
  for (int round = 0; round < 3; ++round) {
    in.push_back(host_ms([&] { must(device.pin(memory)); }));
    out.push_back(host_ms([&] { device.unpin(memory); }));
  }
  const double gib = static_cast<double>(memory.size()) / static_cast<double>(kGiB);
  fmt::print("{:<44} {:>9.3f} {:>9.3f} {:>9.3f} {:>8.0f} %\n", name, in.front() / 1000 / gib, median(in) / 1000 / gib,
             median(out) / 1000 / gib, huge);
}

}  // namespace

void bench_dma(const PathsBench& bench) {
  Device& device = *bench.device;
  const BenchMemory there(device, MemoryKind::kDevice, kGiB), other(device, MemoryKind::kDevice, kGiB);
  const BenchMemory here(device, MemoryKind::kPinned, kGiB), back(device, MemoryKind::kPinned, kGiB);
  const auto second = static_cast<cudaStream_t>(must(device.make_stream()));
  cudaEvent_t joined = nullptr;
  must(cudaEventCreateWithFlags(&joined, cudaEventDisableTiming));
  const auto copy = [](const BenchMemory& to, const BenchMemory& from, cudaStream_t stream) {
    must(cudaMemcpyAsync(to.data(), from.data(), kGiB, cudaMemcpyDefault, stream));
  };
  std::vector<double> down, up, both, within;
  for (int round = 0; round <= kRounds; ++round) {
    const cudaStream_t stream = bench.cuda_stream();
    const double ms[] = {device_ms(stream, 1, [&] { copy(here, there, stream); }),
                         device_ms(stream, 1, [&] { copy(there, here, stream); }),
                         device_ms(stream, 1,
                                   [&] {
                                     must(cudaEventRecord(joined, stream));
                                     must(cudaStreamWaitEvent(second, joined, 0));
                                     copy(here, there, stream);
                                     copy(other, back, second);
                                     must(cudaEventRecord(joined, second));
                                     must(cudaStreamWaitEvent(stream, joined, 0));
                                   }),
                         device_ms(stream, 4, [&] { copy(other, there, stream); })};
    if (round == 0) continue;  // warms up
    down.push_back(ms[0]);
    up.push_back(ms[1]);
    both.push_back(ms[2]);
    within.push_back(ms[3]);
  }
  must(cudaEventDestroy(joined));
  device.drop_stream(second);
  fmt::print("\ncopy engines, 1 GiB, pinned\n{:<24} {:>8.1f}\n{:<24} {:>8.1f}\n{:<24} {:>8.1f} each\n{:<24} {:>8.0f}\n",
             "down", gb_per_s(kGiB, median(down)), "up", gb_per_s(kGiB, median(up)), "both at once",
             gb_per_s(kGiB, median(both)), "within the GPU", gb_per_s(kGiB, median(within)));
}

void bench_pinning(const PathsBench& bench) {
  fmt::print("\npinning, s/GiB, memory that was written before\n{:<44} {:>9} {:>9} {:>9} {:>10}\n", "", "first",
             "later", "unpin", "2 MiB");
  for (const bool is_huge : {false, true}) {
    void* const mapped = ::mmap(nullptr, kGiB + kHugePageBytes, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    KVFERRY_CHECK(mapped != MAP_FAILED, "no memory");
    const auto begin =
        (reinterpret_cast<std::uintptr_t>(mapped) + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
    auto* const memory = reinterpret_cast<std::byte*>(begin);
    ::madvise(memory, kGiB, is_huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    pin(*bench.device, is_huge ? "private, 2 MiB pages asked for" : "private, 4 KiB pages", {memory, kGiB});
    ::munmap(mapped, kGiB + kHugePageBytes);
  }
  const SharedMemory pool = must(SharedMemory::create("gpu_paths_bench", kGiB));
  pin(*bench.device, "a chunk pool's shared memory", pool.span());
}

void bench_hash(const PathsBench& bench) {
  constexpr std::uint64_t kChunk = std::uint64_t{32} << 20;
  Device& device = *bench.device;
  fmt::print("\nchecksums alone, chunks of 32 MiB\n{:<24} {:>8} {:>8} {:>7}\n", "", "GB/s", "reading", "of it");
  for (const MemoryKind kind : {MemoryKind::kDevice, MemoryKind::kPinned}) {
    const bool is_device = kind == MemoryKind::kDevice;
    const std::uint64_t bytes = is_device ? kGiB : kGiB / 4;
    const BenchMemory memory(device, kind, bytes);
    std::vector<std::span<const std::byte>> chunks;
    for (std::uint64_t at = 0; at < bytes; at += kChunk) chunks.emplace_back(memory.data() + at, kChunk);
    std::vector<double> hash, read;
    for (int round = 0; round <= kRounds; ++round) {
      std::unique_ptr<Device::Checksums> sums;  // dropped when the clock has stopped
      const double ms = device_ms(bench.cuda_stream(), 1, [&] { sums = must(device.checksums(chunks, bench.stream)); });
      const double limit =
          device_ms(bench.cuda_stream(), 1, [&] { must(launch_read(memory.data(), bytes, bench.cuda_stream())); });
      if (round == 0) continue;  // warms up
      hash.push_back(ms);
      read.push_back(limit);
    }
    fmt::print("{:<24} {:>8.0f} {:>8.0f} {:>5.0f} %\n", is_device ? "GPU memory" : "pinned host memory",
               gb_per_s(bytes, median(hash)), gb_per_s(bytes, median(read)), 100 * median(read) / median(hash));
  }
}

}  // namespace kvferry
