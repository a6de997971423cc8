// Records what went wrong with which chunk, at which node, and when.
//
// If a prompt did not come whole from its prefill node to its decode node, only a mishap to its own chunks, on its own
// way, is an excuse.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "connector/core/chunk_meta.h"
#include "tally.h"
#include "transport/base/clock.h"

namespace kvferry::sim {

/// What a prefill node has of a chunk when a prompt is handed over.
enum class AtPrefill {
  kMissing,
  kThere,    // the chunk, or a save of it
  kPulled,   // a pull that brings it, for another request or because of an order
  kFailing,  // a save of it that has failed at a rank and goes on at others, so that no other save of it can begin
};

/// A prompt that is handed over from a prefill node to a decode node.
struct Handoff {
  std::size_t from = 0, to = 0;
  TimeNs asked = 0;  // time at which the prefill was sent
  TimeNs handed = 0;
  TimeNs longest_wait = 0;  // longest time that the decode node's lookups wait for other nodes
  std::uint32_t num_tokens = 0;
  std::vector<ChunkMeta> chunks;
  std::vector<AtPrefill> at_prefill;  // [chunk]
  // three loads of the prefill request found damage, so the prefill node keeps no chunks of it
  bool is_uncached = false;
  bool is_suspect = false;  // the decode node sends no requests to the prefill node at that time
};

class Mishaps {
 public:
  /// The counter of the tally for the handoffs that a mishap of this kind excuses.
  using Kind = std::uint64_t Tally::*;

  void to_chunks(Kind kind, std::size_t node, std::span<const ChunkKey> chunks, TimeNs when, TimeNs end);
  /// Records a mishap to all chunks of a node, or to everything that one node requests from another.
  void to_link(Kind kind, std::size_t node, std::size_t other, TimeNs when);
  /// Returns why the chunk may be missing at the decode node at this time; nullptr if nothing excuses this.
  Kind excuse(const Handoff& handoff, std::size_t chunk, TimeNs until) const;

 private:
  struct Mishap {
    Kind kind;
    std::size_t node;
    TimeNs when, end;
  };
  Kind to_chunk_at(const Handoff& handoff, std::size_t chunk, std::size_t node, TimeNs from, TimeNs until) const;
  bool has(Kind kind, std::size_t node, std::size_t other, TimeNs from, TimeNs until) const;

  std::unordered_map<ChunkKey, std::vector<Mishap>> by_chunk_;
  std::map<std::pair<std::size_t, std::size_t>, std::vector<Mishap>> by_link_;
};

}  // namespace kvferry::sim
