// Pins of operators and read leases of nodes: which chunks the nodes must not evict, and until when.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "controller/protocol/values.h"
#include "transport/base/chunk_key.h"
#include "transport/base/clock.h"
#include "transport/base/ids.h"
#include "transport/base/result.h"

namespace kvferry::controller {

using ControllerPinId = StrongId<struct ControllerPinIdTag, std::uint64_t>;  // id of a pin; 0 stands for no pin

struct PinOptions {
  TimeNs ttl_max = 24 * 3600 * kSecond;
  std::size_t keys_per_pin_max = 65'536;
  std::size_t keys_max = std::size_t{1} << 20;  // limit on the keys of all pins together
  // Limit on the keys of one owner's pins together, so that no owner can use up keys_max.
  std::size_t keys_per_owner_max = std::size_t{1} << 18;
};

/// A pin covers keys of one namespace for one owner until a deadline. Until then every node that holds a chunk with one
/// of the keys, or gets one, is ordered to pin that chunk. Pure: time is an argument. Threads: one at a time.
class Pins {
 public:
  struct Pin {
    std::string name_space;
    std::string owner;
    std::vector<ChunkKey> keys;
    TimeNs deadline = 0;
    std::set<NodeId> nodes;  // nodes that were ordered to pin some of the keys
  };
  /// The keys of one pin that one node has to pin.
  struct Order {
    ControllerPinId id;
    std::vector<ChunkKey> keys;
    TimeNs ttl = 0;
  };

  explicit Pins(PinOptions options = {}) : options_(options) {}

  /// Adds a pin, which lasts `ttl_ms`. kInvalidArgument: no owner, no keys, more than keys_per_pin_max keys, or a
  /// `ttl_ms` of 0 or above ttl_max. kFull: the owner's pins together, or all pins together, would have too many keys.
  Result<ControllerPinId> add(const std::string& name_space, const std::string& owner, std::vector<ChunkKey> keys,
                              TimeNs now, std::uint64_t ttl_ms);
  /// Ends a pin and returns the nodes that have to unpin it. kNotFound: the pin does not exist or has ended already.
  Result<std::set<NodeId>> release(ControllerPinId id);
  /// Ends all pins of an owner and returns, for each pin, the nodes that have to unpin it.
  std::map<ControllerPinId, std::set<NodeId>> release_owner(const std::string& owner);
  /// Ends pins whose deadline has passed. Nodes get no order to unpin, because the order to pin contained the deadline.
  void expire(TimeNs now);

  /// Returns orders for `node`, which holds all of `keys`, to pin those of `keys` that some pin covers.
  std::vector<Order> orders_for(const std::string& name_space, NodeId node, std::span<const ChunkKey> keys, TimeNs now);
  /// Removes a node, which has left the directory, from all pins.
  void remove(NodeId node);

  const Pin* find(ControllerPinId id) const;
  std::size_t size() const { return pins_.size(); }
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
  using ById = std::map<ControllerPinId, Pin>;

  ById::iterator end(ById::iterator pin);

  PinOptions options_;
  ById pins_;
  std::unordered_map<Place, std::vector<ControllerPinId>, PlaceHash> by_key_;
  std::map<std::string, std::size_t> num_keys_of_;  // [owner] number of pinned keys
  std::size_t num_keys_ = 0;
  std::uint64_t last_id_ = 0;
};

}  // namespace kvferry::controller
