// What went wrong with which chunk at which node and when: a prompt that did not come whole from its prefill node to
// its decode node is excused by what happened to its own chunks on its own way, and by nothing else.
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

/// A prompt on its way.
struct Handoff {
  std::size_t from = 0, to = 0;
  TimeNs asked = 0;  // when the prefill was sent off
  TimeNs handed = 0;
  TimeNs longest_wait = 0;  // of the decode node's lookups
  std::uint32_t num_tokens = 0;
  std::vector<ChunkMeta> chunks;
  std::vector<bool> is_there;   // [chunk] the prefill node has it, or saves it, when the prompt is handed over
  std::vector<bool> is_pulled;  // [chunk] the prefill node pulls it then, for another request or by an order
  bool is_uncached = false;     // the prefill node keeps nothing of it, since three of its loads found damage
  bool is_suspect = false;      // the decode node asks nothing of the prefill node then
};

class Mishaps {
 public:
  /// The line of the tally in which handoffs that this kind excuses are counted.
  using Kind = std::uint64_t Tally::*;

  void to_chunks(Kind kind, std::size_t node, std::span<const ChunkKey> chunks, TimeNs when, TimeNs end);
  /// Something that touches all chunks of a node, or all that one node wants of another.
  void to_link(Kind kind, std::size_t node, std::size_t other, TimeNs when);
  /// Why the chunk may be missing at the decode node at this time; nullptr: nothing excuses that.
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
