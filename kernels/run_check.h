// Checks that every packer makes: of its layout once, of its arguments at each call before it copies the first byte.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/chunk_shape.h"
#include "kernels/packer.h"

namespace kvferry {

/// Returns kInvalidArgument unless the layout is valid, its sizes and addresses fit 64 bits, and no two elements of a
/// plane share a byte (a stride left at zero would make scatter lose tokens silently).
Result<void> check_layout(const KvLayout& layout);

/// Returns kInvalidArgument unless each layer's block table names a valid block for every token of the run, the chunk
/// buffer has room for run.num_tokens tokens, and all heads of the chunk are copied. `layout` must have passed
/// check_layout().
Result<void> check_gather(const KvLayout& layout, const ChunkShape& shape, const TokenRun& run,
                          std::size_t chunk_bytes);

/// Same as check_gather(), but the chunk has chunk_tokens tokens, of which the run's are those from skip_tokens on, and
/// only some of its heads may be copied.
Result<void> check_scatter(const KvLayout& layout, const ChunkShape& shape, const TokenRun& run,
                           std::size_t chunk_bytes, std::uint32_t chunk_tokens, std::uint32_t skip_tokens);

}  // namespace kvferry
