// A piece of a chunk table, as a walk sees it and a reload puts it back.
#pragma once

#include <cstdint>
#include <vector>

#include "controller/api/tier.h"
#include "transport/base/chunk_key.h"

namespace kvferry::controller {

/// A holder's time in a table; never used again in it, other than its index.
using Life = std::uint64_t;

/// Keys in the order of the table, in runs that lie on the same holders. Stands for itself, so that any block can be
/// lost, and the others are good.
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
    std::uint64_t age = 0;  // in the order in which they came, within a table
  };
  std::vector<ChunkKey> keys;
  std::vector<Run> runs;  // of all keys
  std::vector<Member> members;
  std::vector<std::uint32_t> set_ends;  // set i is members [set_ends[i - 1], set_ends[i])
  std::vector<Tail> tails;              // of some of the keys

  void clear() {
    keys.clear();
    runs.clear();
    members.clear();
    set_ends.clear();
    tails.clear();
  }
};

}  // namespace kvferry::controller
