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
  /// True for models with state (Mamba, linear attention, short convolutions). In KV groups with a window, a block then
  /// holds the model's state after the block's last token, and only if a step ended there. Chunks and windows must be
  /// one block long, and a hit ends after a token for which a state was kept.
  bool keeps_state = false;
  /// If a step of a model with state covers several blocks, the engine also keeps the state at the last block boundary
  /// before the step's end, provided that the boundary lies a multiple of this many tokens after the step's start.
  /// 0: the engine keeps no such state.
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
  TimeNs lease_ttl = 30 * kSecond;    // time after which a lease's pins end if the reader has not released it
  TimeNs handoff_ttl = 60 * kSecond;  // a finished prompt stays pinned this long for its decode worker
  TimeNs push_ttl = 60 * kSecond;     // limit on the time from a push offer to its last chunk, on both nodes
  TimeNs push_grace = 30 * kSecond;   // time for the workers to end a dropped push, before slots are unpinned
  TimeNs order_ttl_max = 24 * 3600 * kSecond;  // upper bound for every ttl in the controller's orders
  TimeNs pin_ttl = 60 * kSecond;  // limit on the pins of lookups and loads, which normally end at the next step
  TimeNs refetch_after = 100 * kMillisecond;  // pause between a failed fetch and the next one of the same request
  std::string secret;  // random bytes, new at each start, from which the ids of leases and reservations are derived

  /// Returns true if a request is scheduled only after its load has ended. A load within a step is allowed only if vLLM
  /// can recover from its failure: vLLM recomputes from the first bad block on, which is impossible with sliding
  /// windows (earlier blocks are gone), or if later steps were already planned on top of the failed load.
  bool loads_async() const { return runs_ahead || windows.size() > 1 || windows[0] > 0; }
};

}  // namespace kvferry
