// The state of pushes in a simulated node's workers and links (sim_push.cpp).
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "connector/core/push_wire.h"

namespace kvferry::sim {

struct NodePushes {
  struct Saved {
    bool ok = false;
    std::uint64_t checksum = 0;
    bool is_in_frame = false;  // true if the chunk is not in its slot yet
  };
  struct Moving {
    ChunkRef chunk;
    std::vector<std::optional<Saved>> saved;  // [rank]
    std::vector<bool> is_begun;               // [rank]
  };
  using Key = std::pair<std::uint64_t, std::uint32_t>;  // the number of the push, the index of the chunk
  struct Order {
    std::size_t to = 0;
    std::uint64_t incarnation = 0;  // incarnation of the other node
    PushReply reply;
  };
  struct PendingGrant {
    std::size_t asker = 0;
    std::uint64_t push = 0;
    PushReply reply;
  };
  std::map<Key, Moving> moving;
  std::map<std::uint64_t, Order> orders;                 // keyed by the number of the push
  std::set<std::uint64_t> dropped;                       // pushes
  std::map<std::uint64_t, PendingGrant> pending_grants;  // keyed by reservation; not answered yet
  std::map<std::tuple<std::uint64_t, std::uint32_t, std::uint32_t>, ChunkRef>
      granted;  // (reservation, index, rank) of the slots that may be written
};

}  // namespace kvferry::sim
