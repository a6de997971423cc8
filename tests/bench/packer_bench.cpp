// Measures the host packer, in GB/s (10^9 bytes of chunks per second, one thread), beside a memcpy of the same bytes.
//
// A gather includes the checksum. Each figure is the median of kRounds rounds over all chunks. The cache is larger than
// the machine's caches, and its blocks are in random order. The row with two chunks stays within the machine's caches,
// so it shows the work without the memory.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "kernels/packer.h"
#include "tests/kernels/test_cache.h"
#include "transport/base/check.h"

namespace kvferry {
namespace {

constexpr std::uint32_t kChunkTokens = 256;
constexpr int kRounds = 9;
constexpr double kRoundBytesMin = 1e9;

/// Returns the GB/s of each work(chunk index) over all chunks. A round repeats a work until it takes long enough to
/// measure. The works take turns, so that other load on the machine affects all of them.
std::vector<double> measure(std::size_t chunk_bytes, std::size_t num_chunks,
                            const std::vector<std::function<void(std::size_t)>>& works) {
  const auto passes =
      static_cast<std::size_t>(kRoundBytesMin / static_cast<double>(chunk_bytes) / static_cast<double>(num_chunks)) + 1;
  std::vector<std::vector<double>> gb_per_s(works.size());
  for (int round = 0; round <= kRounds; ++round) {
    for (std::size_t work = 0; work < works.size(); ++work) {
      const auto begin = std::chrono::steady_clock::now();
      for (std::size_t i = 0; i < passes * num_chunks; ++i) works[work](i % num_chunks);
      const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - begin;
      if (round > 0)  // the first round warms up
        gb_per_s[work].push_back(static_cast<double>(passes * num_chunks * chunk_bytes) / spent.count() / 1e9);
    }
  }
  std::vector<double> medians;
  for (std::vector<double>& rounds : gb_per_s) {
    std::nth_element(rounds.begin(), rounds.begin() + kRounds / 2, rounds.end());
    medians.push_back(rounds[kRounds / 2]);
  }
  return medians;
}

void bench(const std::string& name, const CacheShape& shape, const ChunkFormat& format = {}) {
  TestCache cache(shape);
  Result<std::unique_ptr<Packer>> made = make_host_packer(cache.layout(), format);
  KVFERRY_CHECK(made, "no packer could be made for the row '{}': {}", name, made.error().what);
  const Packer& packer = **made;

  std::vector<std::vector<BlockId>> tables(1, std::vector<BlockId>(shape.blocks));
  std::iota(tables[0].begin(), tables[0].end(), 0);
  std::shuffle(tables[0].begin(), tables[0].end(), std::mt19937(1));
  const std::size_t num_chunks = std::size_t{shape.blocks} * shape.block_tokens / kChunkTokens;
  const std::size_t chunk_bytes = kChunkTokens * packer.chunk_bytes_per_token();
  std::vector<std::byte> pool(num_chunks * chunk_bytes, std::byte{1});
  std::vector<std::byte> copies(num_chunks * chunk_bytes, std::byte{2});
  const auto slot = [&](std::size_t i) { return std::span(pool).subspan(i * chunk_bytes, chunk_bytes); };
  const auto run = [&](std::size_t i) {
    return TokenRun{static_cast<std::uint32_t>(i) * kChunkTokens, kChunkTokens, tables};
  };

  std::uint64_t sink = 0;
  const std::vector<double> rates =
      measure(chunk_bytes, num_chunks,
              {[&](std::size_t i) { sink += *packer.gather(run(i), slot(i)); },
               [&](std::size_t i) { sink += packer.scatter(slot(i), kChunkTokens, 0, run(i)) ? 0 : 1; },
               [&](std::size_t i) { sink += *packer.scatter_and_hash(slot(i), kChunkTokens, 0, run(i)); },
               [&](std::size_t i) { std::memcpy(copies.data() + i * chunk_bytes, slot(i).data(), chunk_bytes); },
               [&](std::size_t i) { sink += chunk_checksum(slot(i)); }});
  const double copy = rates[3];
  fmt::print("{:<34} {:>9} {:>6} {:>6.1f} {:>4.0f} % {:>6.1f} {:>4.0f} % {:>8.1f} {:>8.1f} {:>8.1f}   {:016x}\n", name,
             chunk_bytes / 1024, num_chunks, rates[0], 100 * rates[0] / copy, rates[1], 100 * rates[1] / copy, rates[2],
             copy, rates[4], sink);
}

}  // namespace
}  // namespace kvferry

int main() {
  using namespace kvferry;
  const CacheShape small{.layers = 4,
                         .blocks = 1024,
                         .heads = 2,
                         .block_tokens = 32,
                         .head_dim = 32,
                         .element_bytes = 4,
                         .order = kCpuAttention,
                         .key_transposed = true};
  CacheShape in_cache = small;
  in_cache.blocks = 16;
  const CacheShape llama{
      .layers = 32, .blocks = 256, .heads = 8, .block_tokens = 16, .head_dim = 128, .element_bytes = 2};
  const auto with = [](CacheShape shape, const char* order, std::uint32_t block_tokens = 16) {
    shape.order = order;
    shape.blocks = shape.blocks * shape.block_tokens / block_tokens;
    shape.block_tokens = block_tokens;
    shape.key_transposed = shape.order == kCpuAttention;
    return shape;
  };
  fmt::print("{:<34} {:>9} {:>6} {:>13} {:>13} {:>8} {:>8} {:>8}   {}\n", "GB/s, one thread, 256-token chunks",
             "KiB/chunk", "chunks", "gather", "scatter", "and hash", "memcpy", "checksum", "(guard)");
  bench("test model, fp32, K transposed", small);
  bench("test model, as above, in cache", in_cache);
  bench("Llama-3.1-8B, bf16, NHD", with(llama, kNhd));
  bench("Llama-3.1-8B, bf16, NHD 2*dim", with(llama, kNhdInterleaved));
  bench("Llama-3.1-8B, bf16, HND", with(llama, kHnd));
  bench("Llama-3.1-8B, bf16, HND 2*dim", with(llama, kHndInterleaved));
  bench("Llama-3.1-8B, bf16, CPU K transp.", with(llama, kCpuAttention, 32));
  bench("Llama-3.1-8B, bf16, CPU, block 128", with(llama, kCpuAttention, 128));
  CacheShape wide = with(llama, kCpuAttention, 32);
  wide.element_bytes = 4;
  bench("Llama-3.1-8B, fp32, CPU K transp.", wide);
  wide = with(wide, kCpuAttention, 128);
  bench("Llama-3.1-8B, fp32, CPU, block 128", wide);
  ChunkFormat fp8;
  fp8.cache_type = ElementType::kBf16;
  fp8.chunk_type = ElementType::kE4m3;
  bench("Llama-3.1-8B, bf16 to fp8, HND", with(llama, kHnd), fp8);
}
