// Copies KV between one rank's paged blocks and canonical chunk bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kernels/element_type.h"
#include "kernels/kv_layout.h"
#include "transport/base/checksum.h"
#include "transport/base/ids.h"
#include "transport/base/result.h"

namespace kvferry {

/// Tokens [first_token, first_token + num_tokens) of a sequence. `block_ids`: the sequence's block tables, one for each
/// KV group. Token t lies in block block_ids[group][t / block_tokens] at row t % block_tokens. If that block is
/// kNoBlock, gather writes zeros for the token in the group's layers, and scatter skips the token there.
struct TokenRun {
  std::uint32_t first_token = 0;
  std::uint32_t num_tokens = 0;
  std::span<const std::vector<BlockId>> block_ids;
};

/// Which heads are copied: `count` heads, from head `first_in_cache` of the cache and from head `first_in_chunk` of the
/// chunk on. The node that packs and the node that unpacks may have different numbers of ranks, and so of heads per
/// rank.
struct HeadSlice {
  std::uint32_t chunk_heads = 0;  // number of the chunk's heads; 0: the chunk has the cache's heads, and all are copied
  std::uint32_t first_in_chunk = 0;
  std::uint32_t first_in_cache = 0;
  std::uint32_t count = 0;
};

/// How a chunk's heads and elements differ from the cache's.
struct ChunkFormat {
  HeadSlice heads;
  // Equal types, or two of bf16, fp16, fp32 and fp8 (at most one of them fp8). A cache's element x is stored in the
  // chunk as chunk_type(x * (1 / scale)), and a chunk's element y in the cache as cache_type(y * scale). Both are
  // rounded to nearest even. A value that is too large for its new type becomes the largest finite value in fp8, and
  // infinity in the other types.
  ElementType cache_type = ElementType::kBytes;
  ElementType chunk_type = ElementType::kBytes;
  // Scale of the conversion of each layer's K, then of its V, or of its latent; empty: all are 1. Only for chunks of
  // fp8.
  std::vector<float> scales;
};

/// Gathers and scatters the KV of one cache. Threads: any, as long as no call writes bytes that another call reads or
/// writes. Errors: kInvalidArgument if check_gather() or check_scatter() (chunk_shape.h) rejects the arguments; nothing
/// is copied then.
class Packer {
 public:
  virtual ~Packer() = default;
  virtual const KvLayout& layout() const = 0;
  /// Returns the number of bytes of a token in a chunk, whose heads and elements may differ from the cache's.
  virtual std::uint64_t chunk_bytes_per_token() const = 0;

  /// Copies run.num_tokens tokens into chunk as canonical bytes of a chunk of exactly that many tokens, and returns
  /// their chunk_checksum(). chunk.size() must be at least run.num_tokens * chunk_bytes_per_token(). The format must
  /// select all heads of the chunk, since the checksum covers all of them.
  virtual Result<std::uint64_t> gather(const TokenRun& run, std::span<std::byte> chunk) const = 0;

  /// Same as gather(), and adds the chunk's bytes to `whole`, the checksum of a larger chunk of which this one is a
  /// part.
  virtual Result<std::uint64_t> gather_part(const TokenRun& run, std::span<std::byte> chunk,
                                            ChecksumStream& whole) const {
    const std::uint64_t checksum = KVFERRY_TRY(gather(run, chunk));
    whole.update(chunk.first(run.num_tokens * chunk_bytes_per_token()));
    return checksum;
  }

  /// Copies tokens [skip_tokens, skip_tokens + run.num_tokens) of a canonical chunk of `chunk_tokens` tokens into the
  /// run's blocks.
  virtual Result<void> scatter(std::span<const std::byte> chunk, std::uint32_t chunk_tokens, std::uint32_t skip_tokens,
                               const TokenRun& run) const = 0;

  /// Same as scatter(), and returns the chunk_checksum() of the chunk's chunk_tokens tokens, which include tokens and
  /// heads that are not copied. The blocks are written before the checksum is known, so the caller must not use these
  /// blocks if the checksum is wrong.
  virtual Result<std::uint64_t> scatter_and_hash(std::span<const std::byte> chunk, std::uint32_t chunk_tokens,
                                                 std::uint32_t skip_tokens, const TokenRun& run) const {
    KVFERRY_TRY(scatter(chunk, chunk_tokens, skip_tokens, run));
    return chunk_checksum(chunk.first(chunk_tokens * chunk_bytes_per_token()));
  }
};

/// Makes the packer for host memory. Its results equal those of the plain loop over elements
/// (tests/kernels/reference_packer.h) bit by bit. Errors: kInvalidArgument if the layout or the format is not valid.
Result<std::unique_ptr<Packer>> make_host_packer(KvLayout layout, ChunkFormat format = {});

}  // namespace kvferry
