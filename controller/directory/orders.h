// What the controller asks of nodes' pools, and why: pins and read leases, drains, moves, clearing.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "controller/directory/directory.h"
#include "controller/directory/drains.h"
#include "controller/directory/pins.h"

namespace kvferry::controller {

namespace wire {
struct AdminRequest;
struct AdminReply;
}  // namespace wire

/// An order is a wish that a node may refuse and that ends by itself; what came of it is seen by what nodes tell of
/// their chunks. Pure; time is handed in. Threads: the directory's owner.
class Orders final : private Drains::Cluster {
 public:
  explicit Orders(Directory& directory, HoldOptions holds = {}, DrainOptions drains = {})
      : directory_(directory), holds_(holds), drains_(drains) {}

  /// One message to a node that is registered now.
  struct Order {
    NodeId to;
    std::string bytes;
  };

  /// Verbs: pin, unpin, drain, undrain, move, clear, quota. `asker`: the registered node that asks, if one does.
  wire::AdminReply take(const wire::AdminRequest& request, std::optional<NodeId> asker, TimeNs now);
  /// `node` has told that it has these.
  void published(NodeId node, std::span<const ChunkEntry> chunks, SnapshotMark mark, TimeNs now);
  /// It is gone from the directory.
  void gone(NodeId node);
  /// Deadlines, and drains' and moves' next steps; cheap when called in every turn.
  void advance(TimeNs now);

  /// In this order. Whoever gets an order for a node without a connection drops it.
  std::vector<Order> take_orders() { return std::exchange(orders_, {}); }
  /// Nodes that shall tell all that they hold, again.
  std::vector<NodeId> take_snapshots_wanted() { return std::exchange(snapshots_wanted_, {}); }
  void add_to(Status& status) const;

 private:
  struct Move {
    NodeId from, to;
    std::vector<ChunkKey> keys;  // not there yet
    TimeNs deadline = 0;
  };

  Drains::Place place_of(NodeId leaving, const ChunkKey& key) const override;
  std::vector<NodeId> targets(NodeId leaving) const override;

  wire::AdminReply pin(const wire::AdminRequest& request, std::optional<NodeId> asker, TimeNs now);
  wire::AdminReply unpin(const wire::AdminRequest& request);
  wire::AdminReply drain(const wire::AdminRequest& request, bool is_to_leave);
  wire::AdminReply move(const wire::AdminRequest& request, TimeNs now);
  wire::AdminReply clear(const wire::AdminRequest& request);
  wire::AdminReply quota(const wire::AdminRequest& request);

  Result<NodeId> node_of(const std::string& name_space, const std::string& engine_id) const;
  void keep(NodeId node, std::span<const ChunkKey> keys, TimeNs now);
  void unkeep(ControllerPinId hold, const std::set<NodeId>& nodes);
  void bring(NodeId to, NodeId from, std::span<const ChunkEntry> chunks, TimeNs ttl);
  void forget(NodeId node, std::vector<ChunkKey> keys);
  void advance_moves(TimeNs now);
  template <class Message>
  void order(NodeId to, Message message);
  static std::string reader_name(const NodeInfo& info);

  Directory& directory_;
  Pins holds_;
  Drains drains_;
  std::map<NodeId, std::string> readers_;  // nodes with holds of their own, by the name in them
  std::vector<Move> moves_;
  std::vector<Order> orders_;
  std::vector<NodeId> snapshots_wanted_;
  TimeNs advanced_at_ = 0;
};

}  // namespace kvferry::controller
