// Orders to nodes, and what causes them: pins, read leases, drains, moves, purges and clearing of pools.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "controller/directory/directory.h"
#include "controller/directory/drains.h"
#include "controller/directory/pins.h"
#include "controller/directory/purges.h"

namespace kvferry::controller {

namespace wire {
struct AdminRequest;
struct AdminReply;
}  // namespace wire

/// Turns admin commands and read leases into orders to nodes. Nodes send no answers to orders, and may ignore them.
/// Pins and replications end by themselves at their deadlines. Pure: time is an argument. Threads: the directory's
/// owner.
class Orders final : private Drains::Cluster {
 public:
  explicit Orders(Directory& directory, PinOptions pins = {}, DrainOptions drains = {})
      : directory_(directory), pins_(pins), drains_(drains) {}

  /// One encoded message to a registered node.
  struct Order {
    NodeId to;
    std::string bytes;
  };

  /// Executes an admin command. Verbs: pin, unpin, drain, undrain, move, clear, purge, quota. `asker`: the registered
  /// node that sent the request, if any.
  wire::AdminReply execute(const wire::AdminRequest& request, std::optional<NodeId> asker, TimeNs now);
  void published(NodeId node, std::span<const ChunkEntry> chunks, SnapshotMark mark, TimeNs now);
  /// Queues the orders that follow from the registration of `node`; see Purges::joined().
  void joined(NodeId node, TimeNs now);
  /// Ends the drain, moves and read leases of a node that was removed from the directory.
  void gone(NodeId node);
  /// Checks deadlines and advances drains and moves. Cheap enough for each turn of the server's loop.
  void advance(TimeNs now);

  /// Returns the orders that must be sent now, in this sequence. The caller drops orders to nodes without a connection.
  std::vector<Order> take_orders() { return std::exchange(orders_, {}); }
  /// Returns the nodes from which the caller must request a snapshot.
  std::vector<NodeId> take_snapshots_wanted() { return std::exchange(snapshots_wanted_, {}); }
  void add_to(Status& status) const;

 private:
  /// A move in progress: replicates chunks, and evicts each chunk at its source once it has arrived.
  struct Move {
    NodeId from, to;
    std::vector<ChunkKey> keys;  // keys of the chunks that have not arrived
    TimeNs deadline = 0;
  };

  Drains::Place place_of(NodeId leaving, const ChunkKey& key) const override;
  std::vector<NodeId> targets(NodeId leaving) const override;

  wire::AdminReply pin(const wire::AdminRequest& request, std::optional<NodeId> asker, TimeNs now);
  wire::AdminReply unpin(const wire::AdminRequest& request);
  wire::AdminReply drain(const wire::AdminRequest& request, bool is_to_leave);
  wire::AdminReply move(const wire::AdminRequest& request, TimeNs now);
  wire::AdminReply clear(const wire::AdminRequest& request);
  wire::AdminReply purge(const wire::AdminRequest& request, TimeNs now);
  wire::AdminReply quota(const wire::AdminRequest& request);

  Result<NodeId> node_of(const std::string& name_space, const std::string& engine_id) const;
  void order_pins(NodeId node, std::span<const ChunkKey> keys, TimeNs now);
  void order_unpin(ControllerPinId id, const std::set<NodeId>& nodes);
  void order_replication(NodeId to, NodeId from, std::span<const ChunkEntry> chunks, TimeNs ttl);
  void advance_moves(TimeNs now);
  template <class Message>
  void order(NodeId to, Message message);

  Directory& directory_;
  Pins pins_;
  Drains drains_;
  Purges purges_;
  std::map<NodeId, std::string> readers_;  // [node with read leases] owner's name in these leases
  std::vector<Move> moves_;
  std::vector<Order> orders_;
  std::vector<NodeId> snapshots_wanted_;
  TimeNs advanced_at_ = 0;
};

}  // namespace kvferry::controller
