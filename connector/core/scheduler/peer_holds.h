// What the scheduler core keeps pinned in the pool for other nodes and for the controller.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "connector/core/pool/chunk_pool.h"
#include "transport/base/chunk_key.h"

namespace kvferry {

/// A lease that this node granted to another node.
struct GrantedLease {
  PinId pin;
  std::string handoff;  // name of the hand-off whose prompt is unpinned when this lease is released; empty: none
  std::size_t num_chunks = 0;
  std::uint64_t push = 0;             // LeaseRequest::push, if such a push is in progress; otherwise 0
  std::vector<ChunkKey> announced{};  // the leased chunks, if `push` is not 0
};

/// A finished prompt that stays pinned for its decode node.
struct Handoff {
  PinId pin;
  std::string name;  // FinishedRequest::handoff_name
};
using Handoffs = std::map<std::string, Handoff>;  // [request's id]

struct ControllerPin {
  PinId pin;
  std::size_t num_chunks = 0;
};

}  // namespace kvferry
