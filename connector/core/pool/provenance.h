// Which nodes a chunk's KV has gone through, and whose KV is not accepted any more, because the controller has ordered
// to purge it.
//
// A chunk's givers are the nodes that its KV has passed through, and the members of the cluster that run them. The
// receiver of a chunk records the givers that the sender names, and the sender itself: in a pull the endpoint that was
// asked, and the member that registered it or signed the hand-off with it; in a push the endpoint that the offer names,
// and the member whose key the sender used. So a node can lie about others and, in a push, about its endpoint, but not
// about its member. Without keys for single members no member is recorded. A chunk that is computed on top of loaded
// chunks has their givers, since KV is computed from the KV before it.
#pragma once

#include <cstddef>
#include <cstdint>
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

/// Endpoints of nodes, and members as "member:NAME", sorted. Empty: this node has computed the KV, and used no KV of
/// other nodes for it.
using Givers = std::vector<std::string>;
/// Stands before the name of a member among givers and in orders to purge.
inline constexpr std::string_view kMemberPrefix = "member:";
/// Stands for unknown nodes: older releases don't name givers. Each purge drops chunks with this giver too.
inline constexpr std::string_view kUnknownGiver = "?";

/// Adds `more` to `givers`. If there are more than 32 givers then, or one has more than 512 bytes, kUnknownGiver
/// replaces all of them.
void add_givers(Givers& givers, const Givers& more);

/// Returns the givers of what the node at `endpoint` gives. `member`: name of its member; empty: none, or not known.
Givers givers_of(const std::string& endpoint, const std::string& member);

/// Returns the place (see Provenance::loaded()) of the tails that follow the chunk with this key, or this root.
ChunkKey after(const ChunkKey& parent);

class Provenance {
 public:
  /// Accepts no more KV of `giver` until this time, or until admit(). Returns false and changes nothing if the last
  /// purge of `giver` had the same id, because a node that registers again gets the order again.
  bool purge(const std::string& giver, std::uint64_t id, TimeNs until);
  void admit(const std::string& giver);
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
  /// Returns true if the engine has loaded KV of a purged giver. Then also drops the record of all loaded chunks,
  /// because the engine has to drop all blocks of its prefix cache.
  bool drop_loaded_if_purged();

  std::size_t num_purged() const { return purged_.size(); }

 private:
  using Loaded = std::list<std::pair<ChunkKey, Givers>>;
  struct Purged {
    std::uint64_t id = 0;
    TimeNs until = 0;  // time at which the giver is accepted again
    bool is_admitted = false;
  };
  std::map<std::string, Purged> purged_;  // [giver] its last purge
  Loaded loaded_;                         // the least recently used first
  std::unordered_map<ChunkKey, Loaded::iterator> by_place_;
};

}  // namespace kvferry
