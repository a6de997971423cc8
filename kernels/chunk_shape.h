// The checks that every packer makes. A packer checks its layout and format once, and its arguments at each call before
// it copies the first byte.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "kernels/packer.h"

namespace kvferry {

/// The heads and sizes of a ChunkFormat, checked against a layout, with defaults filled in.
struct ChunkShape {
  std::uint32_t chunk_heads = 0, first_in_chunk = 0, first_in_cache = 0, num_heads = 0;
  std::uint32_t chunk_element_bytes = 0;
  std::uint64_t bytes_per_token = 0;  // number of bytes of a token in a chunk
  bool converts = false;

  /// Returns true if the copied heads are all heads of the chunk.
  bool is_whole() const { return num_heads == chunk_heads; }
};

/// Checks `format` against the layout and fills in its defaults. Errors: kInvalidArgument if heads are out of range, an
/// element type is unknown, the conversion is not supported, the size of the cache's element type differs from the
/// layout's, there are scales but not one for each plane, the scales of a conversion are not allowed (only chunks of
/// fp8 have scales, which are positive), or a token's bytes in a chunk don't fit 64 bits. Precondition: the layout has
/// passed check_layout().
Result<ChunkShape> resolve(const KvLayout& layout, const ChunkFormat& format);

std::string_view name_of(ElementType type);
/// Returns the size of an element in bytes; 0 for kBytes.
std::uint32_t bytes_of(ElementType type);

/// Returns kInvalidArgument unless the layout is valid, its sizes fit 64 bits and its addresses 63 bits, and no two
/// elements of a plane share a byte: each stride of an axis with several elements must span all elements with smaller
/// strides (a stride left at zero would make scatter lose tokens silently).
Result<void> check_layout(const KvLayout& layout);

/// Returns kInvalidArgument unless each layer's block table has a valid block or kNoBlock for every token of the run,
/// the chunk buffer has room for run.num_tokens tokens, and all heads of the chunk are copied. `layout` must have
/// passed check_layout().
Result<void> check_gather(const KvLayout& layout, const ChunkShape& shape, const TokenRun& run,
                          std::size_t chunk_bytes);

/// Same as check_gather(), but the chunk has chunk_tokens tokens, the run's first token is token skip_tokens of the
/// chunk, the run must end within the chunk, and some of the chunk's heads may be left out.
Result<void> check_scatter(const KvLayout& layout, const ChunkShape& shape, const TokenRun& run,
                           std::size_t chunk_bytes, std::uint32_t chunk_tokens, std::uint32_t skip_tokens);

}  // namespace kvferry
