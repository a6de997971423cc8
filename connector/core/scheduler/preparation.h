// Preparations: loads that begin while their prompt is still computed elsewhere and pushed to this node.
//
// A router sends a preparation to the decode node beside the prefill: a request with the same prompt and one more
// token, of which nothing but its KV is wanted. The engine gives it blocks, and the workers unpack each layer into them
// as it arrives. Once the request itself is here and every chunk is verified, the load's end is ordered: the workers
// complete the load, compare all checksums and report it. The engine then caches the blocks, and the request finds them
// there.
//
// A preparation whose chunks do not come, or that is in the way of others, is abandoned: its load is reported as
// failed, so the engine frees the blocks, and its lookup stays pending until the router aborts it. So nothing is ever
// computed for a preparation without a request.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "connector/core/plan.h"
#include "transport/base/chunk_key.h"
#include "transport/base/clock.h"

namespace kvferry {

struct Preparation {
  LoadJob job;                   // without checksums
  std::vector<ChunkRef> chunks;  // all chunks of the prompt, also those that the engine has in its own cache
  ChunkKey last;                 // key of the last one
  std::uint32_t num_tokens = 0;  // tokens of all chunks
  std::uint32_t num_local = 0;   // tokens that the engine had in its own cache
  std::uint64_t num_purges = 0;  // as in OpenLookup
  TimeNs deadline = 0;           // time at which it is abandoned
  bool is_planned = false;       // true once StepPlan::ahead had it
  bool is_ending = false;        // true once its end was ordered, or it was abandoned
  bool is_wanted = false;        // true once a request waits for it
  bool has_request = true;       // false once the preparation itself was aborted
};

constexpr std::size_t kPreparationsMax = 8;

/// Returns true if a preparation of `num_tokens` tokens may begin. `num_open`, `num_open_tokens`: the preparations that
/// hold blocks of the engine, and their tokens. `num_tokens_max`: CoreConfig::prepared_tokens_max.
inline bool may_prepare(std::uint64_t num_tokens, std::size_t num_open, std::uint64_t num_open_tokens,
                        std::uint64_t num_tokens_max) {
  return num_open < kPreparationsMax && num_tokens + num_open_tokens <= num_tokens_max;
}

}  // namespace kvferry
