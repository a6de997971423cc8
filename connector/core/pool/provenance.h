// Which nodes a chunk's KV has gone through, and which nodes' KV is not wanted any more because the controller ordered
// to purge them.
//
// A node that copies a chunk adds the node that it got the bytes from to those which that node tells. It knows this one
// for sure, so a node that lies about the others still can't hide that its own bytes were taken. A chunk that is
// computed on top of loaded chunks has their givers, since KV is computed from the KV before it.
#pragma once

#include <cstddef>
#include <list>
#include <map>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "transport/base/chunk_key.h"
#include "transport/base/clock.h"

namespace kvferry {

/// Endpoints of nodes, sorted. Empty: all was computed by this node, from nothing that others gave.
using Givers = std::vector<std::string>;
/// Stands for nodes that were not told, as by older releases. Each purge takes such chunks too.
inline constexpr std::string_view kUnknownGiver = "?";

/// Adds `more` to `givers`. Of more than 32 endpoints, or of one that is longer than any endpoint, kUnknownGiver is
/// left.
void add_givers(Givers& givers, const Givers& more);

/// Returns the place of tails that follow this chunk or root, see Provenance::loaded().
ChunkKey after(const ChunkKey& parent);

class Provenance {
 public:
  void purge(const std::string& endpoint, TimeNs until);
  void admit(const std::string& endpoint) { purged_.erase(endpoint); }
  void tick(TimeNs now);
  bool is_purged(const Givers& givers) const;

  /// Remembers that the engine has loaded a chunk that others gave: blocks of its prefix cache whose tokens begin like
  /// the chunk may have the chunk's KV. `place` is the chunk's key. A tail has two places, its group and after(parent),
  /// where its givers are only those of tails without a group.
  void loaded(const ChunkKey& place, const Givers& givers);
  /// Returns the givers of what was loaded at this place, nullptr if there are none.
  const Givers* loaded_at(const ChunkKey& place);
  bool has_loaded() const { return !loaded_.empty(); }
  /// Returns true if the engine has loaded KV of a purged node. Then drops all that it has loaded.
  bool drop_loaded_if_purged();

  std::size_t num_purged() const { return purged_.size(); }

 private:
  using Loaded = std::list<std::pair<ChunkKey, Givers>>;
  std::map<std::string, TimeNs> purged_;  // [endpoint] time at which the endpoint is accepted again
  Loaded loaded_;                         // the least recently used first
  std::unordered_map<ChunkKey, Loaded::iterator> by_place_;
};

}  // namespace kvferry
