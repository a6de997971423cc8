// Gather and scatter between one rank's paged KV blocks and canonical chunk bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "transport/base/checksum.h"
#include "transport/base/ids.h"
#include "transport/base/kv_layout.h"
#include "transport/base/result.h"

namespace kvferry {

/// Tokens [first_token, first_token + num_tokens) of a sequence whose block table (one per KV group) is `block_ids`:
/// token t lies in block block_ids[group][t / block_tokens] at row t % block_tokens. Where that is kNoBlock, gather
/// writes zeros and scatter leaves the token out, in that group's layers.
struct TokenRun {
  std::uint32_t first_token = 0;
  std::uint32_t num_tokens = 0;
  std::span<const std::vector<BlockId>> block_ids;
};

/// Threads: any, as long as no two calls write the same bytes. Errors: kInvalidArgument with nothing copied: a block id
/// out of range or missing for a token, a chunk buffer that is too short.
class Packer {
 public:
  virtual ~Packer() = default;
  virtual const KvLayout& layout() const = 0;

  /// Copies run.num_tokens tokens into chunk as canonical bytes of a chunk of exactly that many tokens, and returns the
  /// XXH3-64 of those bytes. chunk.size() >= run.num_tokens * bytes_per_token().
  virtual Result<std::uint64_t> gather(const TokenRun& run, std::span<std::byte> chunk) const = 0;

  /// Copies tokens [skip_tokens, skip_tokens + run.num_tokens) of a canonical chunk of `chunk_tokens` tokens into the
  /// run's blocks.
  virtual Result<void> scatter(std::span<const std::byte> chunk, std::uint32_t chunk_tokens, std::uint32_t skip_tokens,
                               const TokenRun& run) const = 0;
};

/// The plain loop, element by element: slow, obviously right, the reference for tests.
Result<std::unique_ptr<Packer>> make_reference_packer(KvLayout layout);
/// Contiguous runs by memcpy, transposed planes by a blocked loop; same results as the reference, bit by bit.
Result<std::unique_ptr<Packer>> make_host_packer(KvLayout layout);

}  // namespace kvferry
