// A ChunkFormat held against its layout: all numbers filled in, all of them allowed.
#pragma once

#include <cstdint>

#include "kernels/packer.h"

namespace kvferry {

struct ChunkShape {
  std::uint32_t chunk_heads = 0, first_in_chunk = 0, first_in_cache = 0, num_heads = 0;
  std::uint32_t chunk_element_bytes = 0;
  std::uint64_t bytes_per_token = 0;  // of a chunk
  bool converts = false;

  /// Whether the copied heads are all that a chunk has.
  bool is_whole() const { return num_heads == chunk_heads; }
};

/// kInvalidArgument: heads that are not there, a conversion that there is not, types whose size is not the layout's,
/// scales that are not one for each K and V or not positive. `layout` passed check_layout().
Result<ChunkShape> resolve(const KvLayout& layout, const ChunkFormat& format);

std::string_view name_of(ElementType type);
/// 0 for kBytes.
std::uint32_t bytes_of(ElementType type);

}  // namespace kvferry
