// What every packer asks of its layout once and of its arguments at each call, before it copies the first byte.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/chunk_shape.h"
#include "kernels/packer.h"

namespace kvferry {

/// kInvalidArgument unless the layout is valid, its sizes and addresses fit 64 bits, and no two elements of a plane
/// share a byte (a stride left at zero would make scatter lose tokens silently).
Result<void> check_layout(const KvLayout& layout);

/// kInvalidArgument unless each layer's block table names a valid block for every token of the run, the chunk buffer
/// holds run.num_tokens tokens, and the copied heads are all that the chunk has. `layout` passed check_layout().
Result<void> check_gather(const KvLayout& layout, const ChunkShape& shape, const TokenRun& run,
                          std::size_t chunk_bytes);

/// As check_gather(), for a chunk buffer of chunk_tokens tokens that the run's tokens are part of, from skip_tokens on,
/// and of which some heads may be copied.
Result<void> check_scatter(const KvLayout& layout, const ChunkShape& shape, const TokenRun& run,
                           std::size_t chunk_bytes, std::uint32_t chunk_tokens, std::uint32_t skip_tokens);

}  // namespace kvferry
