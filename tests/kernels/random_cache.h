// Caches, block tables, runs and formats drawn from a seed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <random>
#include <vector>

#include "kernels/packer.h"
#include "tests/kernels/test_cache.h"

namespace kvferry {

class Random {
 public:
  explicit Random(std::uint32_t seed) : engine_(seed) {}
  /// Of [lowest, highest].
  std::uint32_t number(std::uint32_t lowest, std::uint32_t highest) {
    return std::uniform_int_distribution<std::uint32_t>(lowest, highest)(engine_);
  }
  bool once_in(std::uint32_t times) { return number(1, times) == 1; }
  template <class T>
  T one_of(std::initializer_list<T> values) {
    return values.begin()[number(0, static_cast<std::uint32_t>(values.size()) - 1)];
  }
  template <class Container>
  void shuffle(Container& values) {
    std::shuffle(values.begin(), values.end(), engine_);
  }
  std::vector<std::byte> bytes(std::size_t size) {
    std::vector<std::byte> result(size);
    for (std::byte& b : result) b = static_cast<std::byte>(engine_());
    return result;
  }

 private:
  std::mt19937 engine_;
};

/// Anything that strides can tell.
CacheShape random_shape(Random& random);

/// Layouts of attention kernels for GPUs: rows are multiples of 16 bytes, dims contiguous.
CacheShape random_gpu_shape(Random& random);

/// For each group its own table: all blocks of the cache, each once, in random order.
std::vector<std::vector<BlockId>> random_tables(Random& random, const CacheShape& shape);

TokenRun random_run(Random& random, std::uint32_t tokens, const std::vector<std::vector<BlockId>>& tables);

/// Conversions where the element's size allows one, some heads of the cache; for a gather all heads of the chunk.
ChunkFormat random_format(Random& random, const CacheShape& shape, bool for_gather);

}  // namespace kvferry
