// The section of gpu_paths_bench about vLLM's layouts: gather and scatter, with and without checksums, where the chunks
// lie in GPU memory and where they lie in pinned host memory.
#include <fmt/format.h>

#include "tests/gpu/bench/paths_bench.h"

namespace kvferry {
namespace {

constexpr std::uint32_t kTokens = 4096;
constexpr int kRounds = 7;

struct Layout {
  const char* name;
  CacheShape shape;
};

CacheShape mla(std::uint32_t token_bytes, std::uint32_t element_bytes, std::uint32_t block_tokens) {
  return {.layers = 61,
          .blocks = kTokens / block_tokens,
          .planes = 1,
          .heads = 1,
          .block_tokens = block_tokens,
          .head_dim = token_bytes / element_bytes,
          .element_bytes = element_bytes,
          .order = kNhd};
}

std::vector<Layout> layouts() {
  constexpr std::uint32_t kBlocks = kTokens / 16;
  CacheShape fp8 = llama_8b(kBlocks, kNhd);
  fp8.element_bytes = 1;
  return {{"8B, NHD [block][k v][token][head]", llama_8b(kBlocks, kNhd)},
          {"8B, NHD, K and V side by side", llama_8b(kBlocks, kNhdInterleaved)},
          {"8B, NHD, K and V as two tensors", llama_8b(kBlocks, kNhdPlanes)},
          {"8B, HND [block][k v][head][token]", llama_8b(kBlocks, kHnd)},
          {"8B, HND, K and V side by side", llama_8b(kBlocks, kHndInterleaved)},
          {"8B, all layers in a block, NHD", llama_8b(kBlocks, kBlockOutermostNhd)},
          {"8B, all layers in a block, HND", llama_8b(kBlocks, kBlockOutermostHnd)},
          {"8B, NHD, fp8", fp8},
          {"DeepSeek-V3, MLA, 576 of bf16", mla(1152, 2, 16)},
          {"DeepSeek-V3.2, MLA, packed fp8, 656 B", mla(656, 1, 64)}};
}

void bench_layout(const PathsBench& bench, const Layout& layout) {
  const PackSetup setup(layout.shape, kTokens);
  const std::uint64_t bytes = setup.bytes();
  std::string text;
  for (const MemoryKind kind : {MemoryKind::kDevice, MemoryKind::kPinned}) {
    const bool is_device = kind == MemoryKind::kDevice;
    const BenchMemory chunks(*bench.device, kind, bytes);
    const BenchMemory blocks(*bench.device, MemoryKind::kDevice, bytes);  // for the copies that are the limit
    const std::vector<PackerJob> jobs = setup.jobs(chunks.data(), kind);
    std::vector<double> ms[6];
    const int calls = is_device ? 4 : 1;
    for (int round = 0; round <= kRounds; ++round) {
      for (int what = 0; what < 6; ++what) {
        std::vector<std::unique_ptr<StreamPacker::Pass>> passes;  // kept until the clock has stopped
        const double now = device_ms(bench.cuda_stream(), calls, [&] {
          const bool goes_down = what == 0;
          if (what < 2)
            must(cudaMemcpyAsync(goes_down ? chunks.data() : blocks.data(), goes_down ? blocks.data() : chunks.data(),
                                 bytes, cudaMemcpyDefault, bench.cuda_stream()));
          else
            passes.push_back(setup.start(jobs, what < 4, what % 2 == 1, bench.stream));
        });
        if (round > 0) ms[what].push_back(now);  // the first round warms up
      }
    }
    const double down = median(ms[0]), up = median(ms[1]);
    text += fmt::format(" {:>7.0f}", gb_per_s(bytes, down));
    for (int what = 2; what < 6; ++what) {
      const double now = median(ms[what]);
      text += fmt::format(" {:>6.0f} {:>3.0f}%", gb_per_s(bytes, now), 100 * (what < 4 ? down : up) / now);
    }
  }
  fmt::print("{:<38}{}\n", layout.name, text);
}

}  // namespace

void bench_layouts(const PathsBench& bench) {
  fmt::print(
      "\nlayouts of {} tokens, chunks of {}: gather, with checksum, scatter, with checksum, each with its share "
      "of the copy\n{:<38} {:>7} {:<47} {:>7} {}\n",
      kTokens, PackSetup::kChunkTokens, "", "copy", "chunks in GPU memory", "copy", "chunks in pinned memory");
  for (const Layout& layout : layouts()) bench_layout(bench, layout);
}

}  // namespace kvferry
