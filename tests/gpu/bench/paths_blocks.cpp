// The section of gpu_paths_bench about what others do in the place of a gather: a copy for each block and layer, as
// vLLM's swap_blocks() makes them, and one call with all of these copies.
#include <fmt/format.h>

#include "tests/gpu/bench/paths_bench.h"

namespace kvferry {
namespace {

constexpr std::uint32_t kTokens = 4096, kLayers = 32;
constexpr std::uint64_t kBlockBytes = std::uint64_t{64} << 10;  // K and V of a layer's block of 16 tokens
constexpr int kRounds = 5;

struct Copies {
  std::vector<const void*> from;
  std::vector<void*> to;
  std::vector<std::size_t> sizes;
};

/// Copies of all blocks of a cache [layer][block] in random order, to `chunks` one after another.
Copies copies_of(std::byte* cache, std::byte* chunks) {
  constexpr std::uint32_t kBlocks = kTokens / 16;
  Copies copies;
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
    for (const BlockId block : shuffled(0, kBlocks, 1)) {
      copies.from.push_back(cache + (layer * kBlocks + static_cast<std::uint64_t>(block)) * kBlockBytes);
      copies.to.push_back(chunks + copies.sizes.size() * kBlockBytes);
      copies.sizes.push_back(kBlockBytes);
    }
  }
  return copies;
}

void copy_each(const Copies& copies, cudaStream_t stream) {
  for (std::size_t i = 0; i < copies.sizes.size(); ++i)
    must(cudaMemcpyAsync(copies.to[i], copies.from[i], copies.sizes[i], cudaMemcpyDefault, stream));
}

/// Returns false if this CUDA or the driver has no batched copies.
bool copy_batch([[maybe_unused]] const Copies& copies, [[maybe_unused]] cudaStream_t stream) {
#if CUDART_VERSION >= 13000
  cudaMemcpyAttributes attributes{};
  attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  std::size_t first = 0;
  return cudaMemcpyBatchAsync(copies.to.data(), copies.from.data(), copies.sizes.data(), copies.sizes.size(),
                              &attributes, &first, 1, stream) == cudaSuccess;
#else
  return false;
#endif
}

}  // namespace

void bench_block_copies(const PathsBench& bench) {
  Device& device = *bench.device;
  const PackSetup setup(llama_8b(kTokens / 16, kNhd), kTokens);
  const std::uint64_t bytes = setup.bytes();
  const BenchMemory cache(device, MemoryKind::kDevice, bytes);
  fmt::print(
      "\na gather of 4096 tokens (8192 copies of 64 KiB), and how others do it: GB/s, ms until the host is free, "
      "ms until the end\n{:<28} {:>30} {:>30}\n",
      "", "to GPU memory", "to pinned memory");
  std::string rows[4] = {"kvferry, with checksum", "a cudaMemcpyAsync a block", "cudaMemcpyBatchAsync", "one copy"};
  for (std::string& row : rows) row = fmt::format("{:<28}", row);
  for (const MemoryKind kind : {MemoryKind::kDevice, MemoryKind::kPinned}) {
    const BenchMemory chunks(device, kind, bytes);
    const std::vector<PackerJob> jobs = setup.jobs(chunks.data(), kind);
    const Copies copies = copies_of(cache.data(), chunks.data());
    std::vector<double> host[4], whole[4];
    bool has_batch = true;
    for (int round = 0; round <= kRounds; ++round) {
      for (int what = 0; what < 4; ++what) {
        std::unique_ptr<StreamPacker::Pass> pass;
        double free_ms = 0;
        const double ms = host_ms([&] {
          free_ms = host_ms([&] {
            if (what == 0) pass = setup.start(jobs, true, true, bench.stream);
            if (what == 1) copy_each(copies, bench.cuda_stream());
            if (what == 2) has_batch = copy_batch(copies, bench.cuda_stream());
            if (what == 3)
              must(cudaMemcpyAsync(chunks.data(), cache.data(), bytes, cudaMemcpyDefault, bench.cuda_stream()));
          });
          must(cudaStreamSynchronize(bench.cuda_stream()));
        });
        if (round == 0) continue;  // warms up
        host[what].push_back(free_ms);
        whole[what].push_back(ms);
      }
    }
    for (int what = 0; what < 4; ++what) {
      if (what == 2 && !has_batch)
        rows[what] += fmt::format(" {:>30}", "none here");
      else
        rows[what] += fmt::format(" {:>10.0f} {:>9.3f} {:>9.3f}", gb_per_s(bytes, median(whole[what])),
                                  median(host[what]), median(whole[what]));
    }
  }
  for (const std::string& row : rows) fmt::print("{}\n", row);
  static_cast<void>(cudaGetLastError());  // of a refused batch
}

}  // namespace kvferry
