// A rank's paged KV cache in test memory, laid out by naming its axes from the outermost to the innermost.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kernels/kv_layout.h"
#include "transport/base/ids.h"

namespace kvferry {

/// The sizes of a cache and the order of its axes.
struct CacheShape {
  std::uint32_t layers = 2;
  std::uint32_t blocks = 4;
  std::uint32_t planes = 2;
  std::uint32_t heads = 2;
  std::uint32_t block_tokens = 4;
  std::uint32_t head_dim = 8;
  std::uint32_t element_bytes = 4;
  std::uint32_t groups = 1;  // layer i is in group i % groups
  /// Outermost to innermost: Layer, Block, Plane, Head, Token, Dim.
  std::string order = "LBPHTD";
  /// Swaps token and dim (the two innermost axes, unpadded) of K alone, as vLLM's CPU attention keeps it.
  bool key_transposed = false;
  /// Bytes left free after each step of the axis, in the order of `order`.
  std::array<std::uint32_t, 6> padding_bytes{};
  /// Axes whose index runs downwards in memory, as bits in the order of `order`; never Layer or Plane.
  std::uint32_t reversed_axes = 0;
  /// Of the first byte; not a multiple of element_bytes is allowed.
  std::uint32_t misalignment_bytes = 0;
};

/// The orders seen in practice, as CacheShape::order.
inline constexpr const char* kNhd = "LBPTHD";             // [block][k or v][token][head][dim]
inline constexpr const char* kNhdPlanes = "LPBTHD";       // K and V as two tensors
inline constexpr const char* kNhdInterleaved = "LBTHPD";  // [block][token][head][2 * dim]
inline constexpr const char* kHnd = "LBPHTD";
inline constexpr const char* kHndInterleaved = "LBHTPD";     // [block][head][token][2 * dim]
inline constexpr const char* kBlockOutermostNhd = "BLPTHD";  // one tensor for all layers
inline constexpr const char* kBlockOutermostHnd = "BLPHTD";
/// vLLM's CPU attention, with key_transposed: [block, head, token, 2 * dim] viewed as [block, head, 2 * token, dim].
inline constexpr const char* kCpuAttention = "LBHPTD";

class TestCache {
 public:
  explicit TestCache(const CacheShape& shape);
  TestCache(const TestCache&) = delete;  // the layout holds addresses of this object's memory
  TestCache& operator=(const TestCache&) = delete;

  const KvLayout& layout() const { return layout_; }
  const std::vector<std::byte>& memory() const { return memory_; }
  void set_memory(std::span<const std::byte> bytes);
  /// Where the element lies in memory(), by the layout's strides.
  std::size_t offset_of(std::size_t layer, std::size_t head, std::size_t plane, std::size_t block,
                        std::size_t token_in_block, std::size_t dim) const;

 private:
  std::vector<std::byte> memory_;  // exactly as long as the elements and paddings need
  KvLayout layout_;
};

}  // namespace kvferry
