// Preparations: requests whose load begins while another node still computes their prompt and pushes it to this node.
//
// While the prefill node computes the prompt of a request (the prepared request), a router sends the decode node a
// preparation: a further request, with the same prompt and one more token, whose answer is not needed. The engine
// allocates blocks for the preparation, and the workers unpack each layer into these blocks as the layer arrives. Once
// the prepared request has arrived and every chunk is verified, the scheduler orders the end of the load: the workers
// complete the load, compare all checksums and report the load. The engine then caches the blocks, and the prepared
// request finds them in the engine's prefix cache.
//
// A preparation is abandoned if its chunks do not come, if other requests need its blocks, or if the router aborts it.
// Its load is then reported as failed, so the engine frees the blocks, and its lookup stays pending until it is
// aborted. So the engine computes nothing for a preparation if the prepared request does not arrive.
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
  ChunkKey last;                 // key of the last chunk
  std::uint32_t num_tokens = 0;  // tokens of all chunks
  std::uint32_t num_local = 0;   // tokens that the engine had in its own cache
  std::uint64_t num_purges = 0;  // as in OpenLookup
  TimeNs deadline = 0;           // time at which the preparation is abandoned, unless its load's end was ordered
  bool is_planned = false;       // true once a plan had the job, in StepPlan::ahead or `abandoned`
  bool is_ending = false;        // true once the load's end was ordered, or the preparation was abandoned
  bool is_wanted = false;        // true once a request has waited for the preparation; false again if abandoned
  bool has_request = true;       // false once the preparation's own request has finished or was aborted
};

constexpr std::size_t kPreparationsMax = 8;

/// Returns true if a preparation of `num_tokens` tokens may begin while `num_open` preparations, with `num_open_tokens`
/// tokens together, hold blocks of the engine. `num_tokens_max` is CoreConfig::prepared_tokens_max.
inline bool may_prepare(std::uint64_t num_tokens, std::size_t num_open, std::uint64_t num_open_tokens,
                        std::uint64_t num_tokens_max) {
  return num_open < kPreparationsMax && num_tokens + num_open_tokens <= num_tokens_max;
}

}  // namespace kvferry
