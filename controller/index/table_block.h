// A piece of a chunk table, written by a walk and read by a reload.
#pragma once

#include <cstdint>
#include <vector>

#include "controller/api/tier.h"
#include "transport/base/chunk_key.h"

namespace kvferry::controller {

/// Identifies a holder of a table for good; its HolderIndex is reused after removal.
using Life = std::uint64_t;

/// Keys in table order, in runs with equal holders. A block is self-contained: if one is lost, the others stay usable.
struct TableBlock {
  struct Member {
    Life life = 0;
    Tier tier = Tier::kGpu;
  };
  struct Run {
    std::uint32_t set = 0;
    std::uint32_t num_keys = 0;
  };
  struct Tail {
    ChunkKey key;
    ChunkKey group;  // zeros: none
    Life life = 0;
    std::uint32_t num_tokens = 0;
    std::uint64_t age = 0;  // insertion number within the table
  };
  std::vector<ChunkKey> keys;
  std::vector<Run> runs;  // together cover all keys
  std::vector<Member> members;
  std::vector<std::uint32_t> set_ends;  // set i is members [set_ends[i - 1], set_ends[i])
  std::vector<Tail> tails;              // keys that are tails

  void clear() {
    keys.clear();
    runs.clear();
    members.clear();
    set_ends.clear();
    tails.clear();
  }
};

}  // namespace kvferry::controller
