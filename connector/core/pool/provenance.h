// Which nodes a chunk's KV has gone through, and which nodes' KV is not accepted any more, because the controller has
// ordered to purge it.
//
// A chunk's givers are the nodes that its KV has passed through. The receiver of a chunk records the givers that the
// sender names, and the sender itself: in a pull the endpoint that was asked, in a push the endpoint that the offer
// names. So a node can lie about others, and in a push also about itself. A chunk that is computed on top of loaded
// chunks has their givers, since KV is computed from the KV before it.
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

/// Endpoints of nodes, sorted. Empty: this node has computed the KV, and used no KV of other nodes for it.
using Givers = std::vector<std::string>;
/// Stands for unknown nodes: older releases don't name givers. Each purge drops chunks with this giver too.
inline constexpr std::string_view kUnknownGiver = "?";

/// Adds `more` to `givers`. If there are more than 32 givers then, or one has more than 512 bytes, kUnknownGiver
/// replaces all of them.
void add_givers(Givers& givers, const Givers& more);

/// Returns the place (see Provenance::loaded()) of the tails that follow the chunk with this key, or this root.
ChunkKey after(const ChunkKey& parent);

class Provenance {
 public:
  void purge(const std::string& endpoint, TimeNs until);
  void admit(const std::string& endpoint) { purged_.erase(endpoint); }
  void tick(TimeNs now);
  bool is_purged(const Givers& givers) const;

  /// Records the givers of a chunk that the engine loads. From then on, blocks of the engine's prefix cache may have
  /// the chunk's KV. `place` says which tokens the chunk has. For a full chunk it is the chunk's key. For a tail with a
  /// group the caller records two places: the group, with the givers, and after(parent), with empty givers. For a tail
  /// without a group the caller records only after(parent), with the givers.
  void loaded(const ChunkKey& place, const Givers& givers);
  /// Returns the givers of what was loaded at this place, nullptr if nothing was recorded there.
  const Givers* loaded_at(const ChunkKey& place);
  bool has_loaded() const { return !loaded_.empty(); }
  /// Returns true if the engine has loaded KV of a purged node. Then also drops the record of all loaded chunks,
  /// because the engine has to drop all blocks of its prefix cache.
  bool drop_loaded_if_purged();

  std::size_t num_purged() const { return purged_.size(); }

 private:
  using Loaded = std::list<std::pair<ChunkKey, Givers>>;
  std::map<std::string, TimeNs> purged_;  // [endpoint] time at which the endpoint is accepted again
  Loaded loaded_;                         // the least recently used first
  std::unordered_map<ChunkKey, Loaded::iterator> by_place_;
};

}  // namespace kvferry
