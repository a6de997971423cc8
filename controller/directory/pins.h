// What nodes are asked to keep for a while: read leases of nodes and pins of operators.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "controller/protocol/node_id.h"
#include "transport/base/chunk_key.h"
#include "transport/base/clock.h"
#include "transport/base/ids.h"
#include "transport/base/result.h"

namespace kvferry::controller {

using ControllerPinId = StrongId<struct HoldIdTag, std::uint64_t>;  // 0: none

struct HoldOptions {
  TimeNs ttl_max = 24 * 3600 * kSecond;
  std::size_t keys_per_hold_max = 65'536;
  std::size_t keys_max = std::size_t{1} << 20;            // over all holds
  std::size_t keys_per_owner_max = std::size_t{1} << 18;  // one tenant can't take it all
};

/// Some keys of one namespace, by one owner, until a deadline. A hold does not say where its keys are: whoever has one
/// of them is asked to keep it, also who gets it later. Pure; time is handed in. Threads: one at a time.
class Pins {
 public:
  struct Hold {
    std::string name_space;
    std::string owner;
    std::vector<ChunkKey> keys;
    TimeNs deadline = 0;
    std::set<NodeId> asked;  // nodes that may keep something for it
  };
  /// Of one hold, what one node shall keep.
  struct Wish {
    ControllerPinId hold;
    std::vector<ChunkKey> keys;
    TimeNs ttl = 0;
  };

  explicit Pins(HoldOptions options = {}) : options_(options) {}

  /// kInvalidArgument: no owner, no keys, or a `ttl` that is not in (0, ttl_max]. kFull: more keys than are allowed,
  /// for the owner or over all.
  Result<ControllerPinId> add(const std::string& name_space, const std::string& owner, std::vector<ChunkKey> keys, TimeNs now,
                     TimeNs ttl);
  /// Nodes that were asked to keep something for it; to be told that it is over. kNotFound: it ended before, or never
  /// was.
  Result<std::set<NodeId>> release(ControllerPinId hold);
  /// All of an owner's; by hold, the nodes that were asked.
  std::map<ControllerPinId, std::set<NodeId>> release_owner(const std::string& owner);
  /// Pins whose deadline has passed end; nodes need not be told, they have the deadline too.
  std::size_t expire(TimeNs now);

  /// What `node` shall keep of these keys, of which it has told just now; it counts as asked.
  std::vector<Wish> wishes(const std::string& name_space, NodeId node, std::span<const ChunkKey> keys, TimeNs now);
  /// The node is gone.
  void forget(NodeId node);

  const Hold* find(ControllerPinId hold) const;
  std::size_t size() const { return holds_.size(); }
  std::size_t num_keys() const { return num_keys_; }

 private:
  struct Place {
    std::string name_space;
    ChunkKey key;
    bool operator==(const Place&) const = default;
  };
  struct PlaceHash {
    std::size_t operator()(const Place& place) const {
      return std::hash<ChunkKey>()(place.key) ^ std::hash<std::string>()(place.name_space);
    }
  };
  using ById = std::map<ControllerPinId, Hold>;

  ById::iterator end(ById::iterator hold);

  HoldOptions options_;
  ById holds_;
  std::unordered_map<Place, std::vector<ControllerPinId>, PlaceHash> by_key_;
  std::map<std::string, std::size_t> num_keys_of_;  // by owner
  std::size_t num_keys_ = 0;
  std::uint64_t last_id_ = 0;
};

}  // namespace kvferry::controller
