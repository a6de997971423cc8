// The scheduler core's settings.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "transport/base/clock.h"

namespace kvferry {

struct CoreConfig {
  std::string fingerprint;
  std::uint32_t chunk_tokens = 256;
  std::uint32_t block_tokens = 16;
  /// [KV group] Number of tokens that its layers attend to, the current one included; 0: all. All sliding windows have
  /// the same size.
  std::vector<std::uint32_t> windows = {0};
  /// True for models with state (Mamba, linear attention, short convolutions): a block of a group with a window holds
  /// the state after the block's last token, and only if a step ended exactly there. Chunks and windows are one block
  /// then, and a hit ends where there is a state.
  bool keeps_state = false;
  /// A step over several blocks of a model with state also leaves the state at the last end of a block before its own
  /// end, if it is a multiple of this many tokens after the step's start; 0: it does not.
  std::uint32_t checkpoint_alignment = 0;
  bool runs_ahead = false;  // the engine plans a step before it has the result of the previous one
  std::uint32_t num_slots = 0;
  std::uint32_t num_ranks = 1;
  bool save_decode_cache = true;
  bool save_partial_chunks = true;
  TimeNs load_timeout = 5 * kSecond;  // the longest time that a lookup stays pending
  TimeNs try_timeout = 1 * kSecond;   // limit on the wait for the directory's or one holder's answer, and for the
                                      // chunks of a push whose request has arrived
  TimeNs pull_timeout = 4 * kSecond;  // limit on the time of one pull
  TimeNs lease_ttl = 30 * kSecond;    // limit on a lease's pins, for readers that end without releasing it
  TimeNs handoff_ttl = 60 * kSecond;  // a finished prompt stays pinned this long for its decode worker
  TimeNs push_ttl = 60 * kSecond;     // limit on the time from an offer to its last chunk, on both sides
  TimeNs push_grace = 30 * kSecond;   // time for the workers to end a dropped push, before slots are unpinned
  TimeNs order_ttl_max = 24 * 3600 * kSecond;  // upper bound for every ttl in the controller's orders
  TimeNs pin_ttl = 60 * kSecond;               // limit for lookups and loads; in practice the next step ends their pins
  TimeNs refetch_after = 100 * kMillisecond;   // pause between a failed fetch and the next one of the same request
  std::string secret;  // random bytes of this start, from which the numbers of leases, pushes and reservations follow

  /// Returns true if a request is scheduled only after its load has ended. A load within a step is possible only where
  /// vLLM can recover from its failure: vLLM restarts at the first bad block, which fails with sliding windows (earlier
  /// blocks are gone), and if later steps were already planned on top of the failed load.
  bool loads_async() const { return runs_ahead || windows.size() > 1 || windows[0] > 0; }
};

}  // namespace kvferry
