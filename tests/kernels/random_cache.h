// Makes random caches, block tables, runs and formats from a seed.
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
  /// Returns a random number in [lowest, highest].
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

/// Returns any shape that strides can describe.
CacheShape random_shape(Random& random);

/// Returns a layout of attention kernels for GPUs: rows are multiples of 16 bytes, and the dims are contiguous.
CacheShape random_gpu_shape(Random& random);

/// Returns a table for each group, with all blocks of the cache, each once, in random order.
std::vector<std::vector<BlockId>> random_tables(Random& random, const CacheShape& shape);

TokenRun random_run(Random& random, std::uint32_t tokens, const std::vector<std::vector<BlockId>>& tables);

/// Returns a random format: a conversion if the element's size allows one, some heads of the cache, and for a gather
/// all heads of the chunk.
ChunkFormat random_format(Random& random, const CacheShape& shape, bool for_gather);

}  // namespace kvferry
