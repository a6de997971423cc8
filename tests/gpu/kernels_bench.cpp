// Measures the CUDA packer, in GB/s, beside a device-to-device cudaMemcpy of the same bytes in the same run.
//
// The bytes of the chunks count once. Each figure is the median of kRounds rounds. The blocks are in random order. The
// packer's copies and the memcpys take turns, so that clock rates and heat are the same for both.
#include <cuda_runtime.h>
#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "kernels/cuda/cuda_device.h"
#include "tests/gpu/device_cache.h"
#include "transport/base/check.h"

namespace kvferry {
namespace {

constexpr int kRounds = 15, kCallsPerRound = 8;
constexpr std::uint32_t kChunkTokens = 256;

void must(cudaError_t code) { KVFERRY_CHECK(code == cudaSuccess, "CUDA: {}", cudaGetErrorString(code)); }

/// Returns the milliseconds of one call, measured by events around several calls on the default stream.
template <class Call>
double time_ms(Call call) {
  cudaEvent_t begin, end;
  must(cudaEventCreate(&begin));
  must(cudaEventCreate(&end));
  must(cudaEventRecord(begin, nullptr));
  for (int i = 0; i < kCallsPerRound; ++i) call();
  must(cudaEventRecord(end, nullptr));
  must(cudaEventSynchronize(end));
  float ms = 0;
  must(cudaEventElapsedTime(&ms, begin, end));
  must(cudaEventDestroy(begin));
  must(cudaEventDestroy(end));
  return ms / kCallsPerRound;
}

double median(std::vector<double>& values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

struct Case {
  const char* name;
  CacheShape shape;
  std::uint32_t num_tokens;  // tokens in a call
  ChunkFormat format = {};
};

void bench(const Case& what) {
  const DeviceCache cache(what.shape);
  const auto packer = make_cuda_packer(0, cache.layout(), what.format).value();
  std::vector<std::vector<BlockId>> tables(1, std::vector<BlockId>(what.shape.blocks));
  std::iota(tables[0].begin(), tables[0].end(), 0);
  std::shuffle(tables[0].begin(), tables[0].end(), std::mt19937(1));
  const std::size_t bytes = what.num_tokens * packer->chunk_bytes_per_token();
  const DeviceBytes pool(bytes), from(bytes), to(bytes);
  std::vector<PackerJob> jobs;
  for (std::uint32_t first = 0; first < what.num_tokens; first += kChunkTokens) {
    const std::uint32_t tokens = std::min(kChunkTokens, what.num_tokens - first);
    jobs.push_back({TokenRun{first, tokens, tables}, pool.data() + first * packer->chunk_bytes_per_token(),
                    tokens * packer->chunk_bytes_per_token(), tokens, 0});
  }
  // the passes are kept until the clock has stopped, because the destructor of a pass waits for the pass
  std::vector<std::unique_ptr<StreamPacker::Pass>> passes;
  const auto copy = [&](bool gathers, bool hashes) {
    passes.clear();
    return [&, gathers, hashes] {
      auto pass = gathers ? packer->gather(jobs, nullptr, hashes) : packer->scatter(jobs, nullptr, hashes);
      KVFERRY_CHECK(pass, "{}", pass.error().what);
      KVFERRY_CHECK((*pass)->copy_layers(0, what.shape.layers) && (*pass)->finish(), "no launch");
      passes.push_back(std::move(*pass));
    };
  };
  std::vector<double> ms[5];
  for (int round = 0; round <= kRounds; ++round) {
    const double now[] = {
        time_ms([&] { must(cudaMemcpyAsync(to.data(), from.data(), bytes, cudaMemcpyDeviceToDevice, nullptr)); }),
        time_ms(copy(true, false)), time_ms(copy(true, true)), time_ms(copy(false, false)), time_ms(copy(false, true))};
    for (int i = 0; i < 5 && round > 0; ++i) ms[i].push_back(now[i]);  // the first round warms up
  }
  double gb_per_s[5];
  for (int i = 0; i < 5; ++i) gb_per_s[i] = static_cast<double>(bytes) / median(ms[i]) / 1e6;
  fmt::print("{:<40} {:>7.1f} {:>8.0f}", what.name, static_cast<double>(bytes) / (1 << 20), gb_per_s[0]);
  for (int i = 1; i < 5; ++i) fmt::print(" {:>8.0f} {:>4.0f} %", gb_per_s[i], 100 * gb_per_s[i] / gb_per_s[0]);
  fmt::print("\n");
}

CacheShape shape(std::uint32_t layers, std::uint32_t heads, std::uint32_t dim, const char* order,
                 std::uint32_t num_tokens, std::uint32_t planes = 2) {
  return {.layers = layers,
          .blocks = num_tokens / 16,
          .planes = planes,
          .heads = heads,
          .block_tokens = 16,
          .head_dim = dim,
          .element_bytes = 2,
          .order = order};
}

}  // namespace
}  // namespace kvferry

int main() {
  using namespace kvferry;
  if (const std::string why = why_no_gpu(); !why.empty()) {
    fmt::print(stderr, "gpu_kernels_bench: needs a GPU: {}\n", why);
    return 77;
  }
  cudaDeviceProp device{};
  must(cudaGetDeviceProperties(&device, 0));
  fmt::print("{}, GB/s of chunk bytes, blocks of 16 tokens, and the share of a device-to-device cudaMemcpy\n",
             device.name);
  fmt::print("{:<40} {:>7} {:>8} {:>15} {:>15} {:>15} {:>15}\n", "", "MiB", "memcpy", "gather", "with checksum",
             "scatter", "with checksum");
  ChunkFormat fp8;
  fp8.cache_type = ElementType::kBf16;
  fp8.chunk_type = ElementType::kE4m3;
  bench({"Llama-3.1-8B, HND", shape(32, 8, 128, kHnd, 4096), 4096});
  bench({"Llama-3.1-8B, NHD", shape(32, 8, 128, kNhd, 4096), 4096});
  bench({"Llama-3.1-8B, all layers in a block", shape(32, 8, 128, kBlockOutermostHnd, 4096), 4096});
  bench({"Llama-3.1-8B, NHD, a request of 1k", shape(32, 8, 128, kNhd, 1024), 1024});
  bench({"Llama-3.1-70B, a shard of TP8", shape(80, 1, 128, kNhd, 8192), 8192});
  bench({"DeepSeek-V3, MLA", shape(61, 1, 576, kNhd, 8192, 1), 8192});
  bench({"Llama-3.1-8B, NHD, bf16 to fp8", shape(32, 8, 128, kNhd, 4096), 4096, fp8});
  return 0;
}
