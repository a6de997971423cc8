// Counters of the scheduler core's events; the connector exports them as metrics.
#pragma once

#include <array>
#include <cstdint>

#include "connector/core/flight_recorder.h"

// clang-format off
/// All counters only grow. COUNTER(name) is the field `name` of CoreCounters and the node's metric `name_total`.
#define KVFERRY_CORE_COUNTERS(COUNTER)                                                                      \
  COUNTER(lookups) COUNTER(lookup_hits) COUNTER(hit_tokens) COUNTER(loads) COUNTER(loaded_tokens)           \
  COUNTER(load_failures) COUNTER(resumed) COUNTER(resumed_hit_tokens) COUNTER(saved_chunks)                 \
  COUNTER(saved_tokens) COUNTER(save_failures) COUNTER(pool_full) COUNTER(pulls) COUNTER(pulled_chunks)     \
  COUNTER(pull_failures) COUNTER(fetch_timeouts) COUNTER(leases_granted) COUNTER(pins_expired)              \
  COUNTER(evicted_chunks) COUNTER(pins_refused) COUNTER(pushed_chunks) COUNTER(push_failures)               \
  COUNTER(announced_chunks)                                                                                 \
  COUNTER(received_chunks) COUNTER(mislabeled_chunks) COUNTER(unasked_answers) COUNTER(leases_refused)      \
  COUNTER(holders_suspected) COUNTER(writes_abandoned) COUNTER(unknown_releases)                            \
  COUNTER(unknown_handoffs) COUNTER(pulled_in_frames) COUNTER(pulled_past_frames)                           \
  COUNTER(evicted_for_tenants) COUNTER(purged_chunks) COUNTER(slot_copies_failed) COUNTER(accesses_refused) \
  COUNTER(prepared) COUNTER(preparations_refused) COUNTER(preparations_abandoned)
// clang-format on

namespace kvferry {

struct CoreCounters {
#define KVFERRY_FIELD(name) std::uint64_t name = 0;
  KVFERRY_CORE_COUNTERS(KVFERRY_FIELD)
#undef KVFERRY_FIELD
  /// [cause] Number of tokens that were computed again, see recomputed_tokens().
  std::array<std::uint64_t, kNumCauses> recomputed_tokens{};
};

}  // namespace kvferry
