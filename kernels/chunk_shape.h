// A ChunkFormat checked against its layout, with all defaults filled in.
#pragma once

#include <cstdint>

#include "kernels/packer.h"

namespace kvferry {

struct ChunkShape {
  std::uint32_t chunk_heads = 0, first_in_chunk = 0, first_in_cache = 0, num_heads = 0;
  std::uint32_t chunk_element_bytes = 0;
  std::uint64_t bytes_per_token = 0;  // size of a token in a chunk
  bool converts = false;

  /// Returns true if the copied heads are all heads of the chunk.
  bool is_whole() const { return num_heads == chunk_heads; }
};

/// Errors: kInvalidArgument if heads are out of range, the conversion is not supported, an element type's size differs
/// from the layout's, or there is not one positive scale for each K and V. `layout` must have passed check_layout().
Result<ChunkShape> resolve(const KvLayout& layout, const ChunkFormat& format);

std::string_view name_of(ElementType type);
/// Size of an element; 0 for kBytes.
std::uint32_t bytes_of(ElementType type);

}  // namespace kvferry
