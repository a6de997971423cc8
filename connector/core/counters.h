// The scheduler core's counters.
#pragma once

#include <cstdint>

namespace kvferry {

/// Counters only grow; their names are those of the metrics.
struct CoreCounters {
  std::uint64_t lookups = 0, lookup_hits = 0, hit_tokens = 0, loads = 0, loaded_tokens = 0, load_failures = 0,
                resumed = 0, resumed_hit_tokens = 0, saved_chunks = 0, saved_tokens = 0, save_failures = 0,
                pool_full = 0, pulls = 0, pulled_chunks = 0, pull_failures = 0, fetch_timeouts = 0, leases_granted = 0,
                pins_expired = 0, evicted_chunks = 0, pins_refused = 0, pushed_chunks = 0, push_failures = 0,
                received_chunks = 0;
  bool operator==(const CoreCounters&) const = default;
};

}  // namespace kvferry
