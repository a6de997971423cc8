// A rank's paged KV cache in test memory. The test defines its layout by the order of the axes, from the outermost to
// the innermost.
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
  /// The axes from the outermost to the innermost: Layer, Block, Plane, Head, Token, Dim.
  std::string order = "LBPHTD";
  /// Swaps token and dim (the two innermost axes, which must be unpadded) for K only, as in vLLM's CPU attention.
  bool key_transposed = false;
  /// Unused bytes after each step of an axis, in the order of `order`.
  std::array<std::uint32_t, 6> padding_bytes{};
  /// Axes whose index decreases with the address, as bits in the order of `order`. Layer and Plane are never among
  /// them.
  std::uint32_t reversed_axes = 0;
  /// Distance of the first byte from an aligned address. It need not be a multiple of element_bytes.
  std::uint32_t misalignment_bytes = 0;
};

/// Orders that occur in practice, for CacheShape::order.
inline constexpr const char* kNhd = "LBPTHD";             // [block][k or v][token][head][dim]
inline constexpr const char* kNhdPlanes = "LPBTHD";       // K and V are two tensors
inline constexpr const char* kNhdInterleaved = "LBTHPD";  // [block][token][head][2 * dim]
inline constexpr const char* kHnd = "LBPHTD";
inline constexpr const char* kHndInterleaved = "LBHTPD";     // [block][head][token][2 * dim]
inline constexpr const char* kBlockOutermostNhd = "BLPTHD";  // one tensor has all layers
inline constexpr const char* kBlockOutermostHnd = "BLPHTD";
/// Order of vLLM's CPU attention, with key_transposed: [block, head, token, 2 * dim], viewed as [block, head, 2 *
/// token, dim].
inline constexpr const char* kCpuAttention = "LBHPTD";

class TestCache {
 public:
  explicit TestCache(const CacheShape& shape);
  TestCache(const TestCache&) = delete;  // not copyable, because the layout holds addresses of this object's memory
  TestCache& operator=(const TestCache&) = delete;

  const KvLayout& layout() const { return layout_; }
  const std::vector<std::byte>& memory() const { return memory_; }
  void set_memory(std::span<const std::byte> bytes);
  /// Returns the position of an element in memory(), computed from the layout's strides.
  std::size_t offset_of(std::size_t layer, std::size_t head, std::size_t plane, std::size_t block,
                        std::size_t token_in_block, std::size_t dim) const;

 private:
  std::vector<std::byte> memory_;  // has exactly the length of all elements and paddings
  KvLayout layout_;
};

}  // namespace kvferry
