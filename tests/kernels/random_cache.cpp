#include "tests/kernels/random_cache.h"

#include <numeric>
#include <string_view>

namespace kvferry {

CacheShape random_shape(Random& random) {
  CacheShape shape;
  shape.layers = random.number(1, 3);
  shape.planes = random.number(1, 2);
  shape.heads = random.number(1, 3);
  shape.head_dim = random.one_of<std::uint32_t>({1, 2, 7, 8, 16, 17, 33, 40});
  shape.block_tokens = random.one_of<std::uint32_t>({1, 2, 5, 8, 16, 19, 32});
  shape.element_bytes = random.one_of<std::uint32_t>({1, 2, 2, 4, 4, 8, 3});
  shape.blocks = random.number(1, 6);
  shape.groups = random.number(1, shape.layers);
  shape.misalignment_bytes = random.once_in(3) ? random.number(1, 7) : 0;
  switch (random.number(0, 2)) {
    case 0:
      shape.order = random.one_of(
          {kNhd, kNhdPlanes, kNhdInterleaved, kHnd, kHndInterleaved, kBlockOutermostNhd, kBlockOutermostHnd});
      break;
    case 1:
      shape.order = kCpuAttention;
      shape.key_transposed = true;
      break;
    default:
      shape.order = "LBPHTD";
      random.shuffle(shape.order);
      if (random.once_in(2)) {
        for (std::uint32_t& padding : shape.padding_bytes) padding = random.once_in(3) ? random.number(1, 40) : 0;
      }
      for (std::size_t i = 0; i < shape.order.size(); ++i) {
        if (std::string_view("BHTD").find(shape.order[i]) != std::string_view::npos && random.once_in(6))
          shape.reversed_axes |= 1u << i;
      }
  }
  return shape;
}

CacheShape random_gpu_shape(Random& random) {
  CacheShape shape = random_shape(random);
  shape.head_dim = random.one_of<std::uint32_t>({16, 32, 64, 96, 128, 576});
  shape.element_bytes = random.one_of<std::uint32_t>({1, 2, 2, 4});
  shape.block_tokens = random.one_of<std::uint32_t>({1, 8, 16, 24});
  shape.order =
      random.one_of({kNhd, kNhdPlanes, kNhdInterleaved, kHnd, kHndInterleaved, kBlockOutermostNhd, kBlockOutermostHnd});
  shape.key_transposed = false;
  shape.misalignment_bytes = 0;
  shape.padding_bytes = {};
  for (std::size_t i = 0; i + 1 < shape.order.size(); ++i)
    shape.padding_bytes[i] = random.once_in(4) ? 16 * random.number(1, 3) : 0;
  shape.reversed_axes &= ~(1u << shape.order.find('D'));
  return shape;
}

std::vector<std::vector<BlockId>> random_tables(Random& random, const CacheShape& shape) {
  std::vector<std::vector<BlockId>> tables(shape.groups, std::vector<BlockId>(shape.blocks));
  for (std::vector<BlockId>& table : tables) {
    std::iota(table.begin(), table.end(), 0);
    random.shuffle(table);
  }
  return tables;
}

TokenRun random_run(Random& random, std::uint32_t tokens, const std::vector<std::vector<BlockId>>& tables) {
  const std::uint32_t first = random.number(0, tokens);
  return {first, random.number(0, tokens - first), tables};
}

/// Makes the chunk's elements those of another type than the cache's, but not of fp8.
static void convert_to_wider(Random& random, const CacheShape& shape, ChunkFormat& format) {
  using enum ElementType;
  if (shape.element_bytes == 1) format.cache_type = random.one_of({kE4m3, kE5m2});
  if (shape.element_bytes == 2) format.cache_type = random.one_of({kBf16, kFp16});
  if (shape.element_bytes == 4) format.cache_type = kFp32;
  if (format.cache_type == kBytes) return;
  do {
    format.chunk_type = random.one_of({kBf16, kFp16, kFp32});
  } while (format.chunk_type == format.cache_type);
}

ChunkFormat random_format(Random& random, const CacheShape& shape, bool for_gather) {
  ChunkFormat format;
  if (random.once_in(2)) {
    HeadSlice& heads = format.heads;
    heads.count = random.number(1, shape.heads);
    heads.first_in_cache = random.number(0, shape.heads - heads.count);
    heads.first_in_chunk = for_gather ? 0 : random.number(0, 3);
    heads.chunk_heads = heads.first_in_chunk + heads.count + (for_gather ? 0 : random.number(0, 3));
  }
  if (random.once_in(2) && (shape.element_bytes == 2 || shape.element_bytes == 4)) {
    format.cache_type = shape.element_bytes == 4 ? ElementType::kFp32
                        : random.once_in(2)      ? ElementType::kBf16
                                                 : ElementType::kFp16;
    format.chunk_type = random.once_in(2) ? ElementType::kE4m3 : ElementType::kE5m2;
    if (random.once_in(2)) {
      for (std::uint32_t i = 0; i < shape.layers * shape.planes; ++i)
        format.scales.push_back(0.01F * static_cast<float>(random.number(1, 1000)));
    }
  } else if (random.once_in(4)) {
    convert_to_wider(random, shape, format);
  }
  return format;
}

}  // namespace kvferry
