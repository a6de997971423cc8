#include "tests/kernels/test_cache.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "transport/base/check.h"

namespace kvferry {

TestCache::TestCache(const CacheShape& shape) {
  const auto count = [&](char axis) -> std::uint64_t {
    switch (axis) {
      case 'L':
        return shape.layers;
      case 'B':
        return shape.blocks;
      case 'P':
        return shape.planes;
      case 'H':
        return shape.heads;
      case 'T':
        return shape.block_tokens;
      default:
        return shape.head_dim;
    }
  };
  std::array<std::int64_t, 6> strides{};
  std::uint64_t size_bytes = shape.element_bytes;
  std::int64_t first_bytes = shape.misalignment_bytes;  // offset of the element whose index is 0 on every axis
  for (std::size_t i = 6; i-- > 0;) {
    const std::uint64_t steps = count(shape.order[i]);
    const auto stride = static_cast<std::int64_t>(size_bytes + shape.padding_bytes[i]);
    const bool reversed = (shape.reversed_axes >> i & 1) != 0;
    if (reversed) first_bytes += static_cast<std::int64_t>(steps - 1) * stride;
    strides[i] = reversed ? -stride : stride;
    size_bytes = static_cast<std::uint64_t>(stride) * steps;
  }
  const auto stride_of = [&](char axis) { return strides.at(shape.order.find(axis)); };
  memory_.resize(size_bytes + shape.misalignment_bytes);

  layout_.num_kv_heads = shape.heads;
  layout_.head_dim = shape.head_dim;
  layout_.element_bytes = shape.element_bytes;
  layout_.planes = shape.planes;
  layout_.block_tokens = shape.block_tokens;
  layout_.num_blocks = shape.blocks;
  for (std::uint32_t i = 0; i < shape.layers; ++i) {
    LayerLayout layer{.name = fmt::format("layers.{}.attn", i), .group = i % shape.groups, .key = {}, .value = {}};
    const std::int64_t base = first_bytes + i * stride_of('L');
    layer.key = {.base = reinterpret_cast<std::uint64_t>(memory_.data()) + static_cast<std::uint64_t>(base),
                 .block_stride_bytes = stride_of('B'),
                 .head_stride_bytes = stride_of('H'),
                 .token_stride_bytes = stride_of('T'),
                 .dim_stride_bytes = stride_of('D')};
    layer.value = layer.key;
    layer.value.base += static_cast<std::uint64_t>(stride_of('P'));
    if (shape.key_transposed) {
      KVFERRY_CHECK(
          shape.order.substr(4) == "TD" && layer.key.token_stride_bytes == shape.element_bytes * shape.head_dim,
          "a transposed K needs unpadded tokens and dims innermost, not {}", shape.order);
      layer.key.token_stride_bytes = shape.element_bytes;
      layer.key.dim_stride_bytes = std::int64_t{shape.element_bytes} * shape.block_tokens;
    }
    layout_.layers.push_back(std::move(layer));
  }
}

void TestCache::set_memory(std::span<const std::byte> bytes) {
  KVFERRY_CHECK(bytes.size() == memory_.size(), "{} bytes for a cache of {}", bytes.size(), memory_.size());
  std::copy(bytes.begin(), bytes.end(), memory_.begin());
}

std::size_t TestCache::offset_of(std::size_t layer, std::size_t head, std::size_t plane, std::size_t block,
                                 std::size_t token_in_block, std::size_t dim) const {
  const PlaneLayout& p = plane == 0 ? layout_.layers[layer].key : layout_.layers[layer].value;
  return p.base - reinterpret_cast<std::uint64_t>(memory_.data()) +
         block * static_cast<std::size_t>(p.block_stride_bytes) + head * static_cast<std::size_t>(p.head_stride_bytes) +
         token_in_block * static_cast<std::size_t>(p.token_stride_bytes) +
         dim * static_cast<std::size_t>(p.dim_stride_bytes);
}

}  // namespace kvferry
