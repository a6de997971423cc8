// The controller's side of the protocol: which connection belongs to which node, and the reply to each message. It has
// no sockets, and reads no clock except those in DirectoryOptions.
#pragma once

#include <cstdint>
#include <msgpack.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "controller/api/status.h"
#include "controller/directory/directory.h"
#include "controller/directory/orders.h"
#include "transport/base/clock.h"
#include "transport/base/ids.h"
#include "transport/base/net/members.h"
#include "transport/base/versions.h"
#include "transport/base/wall_clock.h"

namespace kvferry::controller {

/// Identifies a connection of a listener. Ids are never reused.
using ConnectionId = StrongId<struct ConnectionIdTag, std::uint64_t>;

/// Observes the nodes' messages, so that replicas can share them. An observer may also refuse registrations.
/// Threads: the directory's owner. No call blocks or throws.
class SessionObserver {
 public:
  virtual ~SessionObserver() = default;

  /// Returns why the node may not register, as a sentence, or nullopt if it may.
  virtual std::optional<std::string> refusal(const NodeInfo& info) const = 0;
  /// Returns the newest incarnation that is known to have registered with any replica under this namespace and engine
  /// id, or 0 if none is known.
  virtual Incarnation newest(const NodeInfo& info) const = 0;
  /// Called when a node registered, for the first time or again.
  virtual void joined(NodeId node, const NodeInfo& info, std::uint64_t next_sequence, TimeNs now) = 0;
  /// Called for each Publish or Evict of `node`, even if the directory dropped the message.
  virtual void received(NodeId node, std::uint64_t sequence, std::string_view message, TimeNs now) = 0;
  /// Called when a node left or was removed, e.g. because its lease expired. The node may never have registered with
  /// this replica.
  virtual void gone(NodeId node, TimeNs now) = 0;

  /// Called when an admin command that this replica received has succeeded.
  virtual void executed(const wire::AdminRequest& request, TimeNs now) = 0;

  /// Returns the endpoints of the live replicas, this one included. replicas_version() starts at 1 and increases with
  /// each change of the list.
  virtual const std::vector<std::string>& replicas() const = 0;
  virtual std::uint64_t replicas_version() const = 0;
  virtual ScaleStatus status(TimeNs now) const = 0;
};

/// Sends messages to the connections of one listener.
class ReplySender {
 public:
  virtual ~ReplySender() = default;
  /// Returns false if the message was dropped because the connection is gone or its peer does not read. Never blocks or
  /// throws.
  virtual bool send(ConnectionId to, std::string_view bytes) = 0;
};

/// The sessions of all listeners together, because a node may reconnect through another listener. Malformed messages
/// are counted and dropped; messages of an unsupported protocol version are answered with Refused. Threads: the
/// directory's owner. `now` must never decrease.
class Sessions {
 public:
  /// `protocol`: supported versions; empty: those of this release.
  Sessions(const DirectoryOptions& options, TimeNs now, VersionRange protocol = {});

  ConnectionId open() { return ConnectionId{++last_connection_}; }

  /// Handles one message; the replies to it are passed to `replies` before receive() returns. `sender` may send only
  /// what its role allows, and register only nodes whose engine ids it owns. `is_over_share`: the sender has used its
  /// share of the listener's time. Its leases go on, but its lookups get empty answers, its orders are refused, its
  /// requests for the status get no answer, and its long messages are dropped and requested again by the answer to a
  /// later one.
  void receive(ConnectionId from, std::string_view bytes, TimeNs now, ReplySender& replies,
               const net::Identity& sender = {}, bool is_over_share = false);
  /// Counts a message of a member that was revoked, and removes the node that is registered on the connection, if any.
  void revoke(ConnectionId from, TimeNs now);
  /// Adds the nodes that the directory reloaded from the state folder.
  void adopt_nodes();
  /// Removes a closed connection. Its node stays registered, and is removed if its lease expires before it reconnects.
  void disconnected(ConnectionId connection);
  /// Removes nodes whose lease expired, see Directory::expire(), and sends due orders to nodes.
  void expire(TimeNs now);
  Status status(TimeNs now) const;
  /// Sets the observer of all further messages; nullptr: no observer.
  void set_observer(SessionObserver* observer) { observer_ = observer; }
  /// Executes an admin command that another replica received.
  void execute(const wire::AdminRequest& request, TimeNs now);
  /// Removes a node whose newer incarnation registered with another replica.
  void fence(NodeId node, TimeNs now);

  struct Session {
    NodeId node;
    Incarnation incarnation;
    std::uint64_t replicas_version = 0;  // version of the newest list of replicas that was sent to the node
  };
  /// Returns nullptr if the connection has no registered node. The pointer is valid until the next non-const call.
  const Session* session(ConnectionId connection) const;
  std::size_t num_sessions() const { return sessions_.size(); }

  Directory& directory() { return directory_; }
  const Counters& counters() const { return counters_; }
  /// Counts a malformed message. Listeners also call this function for input that is no message. `reason`: what is
  /// wrong with the input.
  void count_malformed(std::string_view reason);
  /// Sets Status::insecure: whether processes on other hosts can reach the controller without a cluster key.
  void set_insecure(bool insecure) { insecure_ = insecure; }
  /// Counts a connection that ended before its peer proved that it has an accepted key.
  void count_refused_handshake();
  /// Counts that messages of a connection wait, or are received as those of a sender that is over its share. `used`:
  /// what the share was used for.
  void count_delayed(ConnectionId connection, std::string_view used);

 private:
  struct Peer {
    std::optional<ConnectionId> connection;  // empty while the node has no connection
    ReplySender* replies = nullptr;          // the sender that reaches `connection`
    std::string name;                        // name of the node in log lines
    std::uint32_t version = 0;               // agreed version of the protocol
  };
  /// Context of the current message.
  struct Turn {
    ConnectionId from;
    TimeNs now;
    ReplySender& replies;
    std::string_view bytes{};
    std::uint32_t version = 0;  // protocol version of the reply
    net::Identity sender{};
    bool is_over_share = false;
  };
  struct Receiver;  // visitor with one overload for each type in wire::FromNode; see session_messages.cpp

  void begin_session(const Turn& turn, NodeId node, const NodeInfo& info);
  void end_session(NodeId node, TimeNs now);
  void request_repair(const Turn& turn, const Session& session);
  void send_orders();
  void count_refused(std::string_view why, TimeNs now);
  std::string name_of(NodeId node) const;
  template <class Message>
  void reply(const Turn& turn, Message message);
  void count_reply(bool is_sent) { ++(is_sent ? counters_.messages_sent : counters_.replies_dropped); }

  VersionRange protocol_;
  std::uint64_t (*newest_incarnation_)();
  WallClock wall_ms_;
  Directory directory_;
  Orders orders_;
  SessionObserver* observer_ = nullptr;
  bool insecure_ = false;
  TimeNs started_at_;
  Counters counters_;
  std::string refusal_;    // text of the last refusal, for Status::refusal
  TimeNs refused_at_ = 0;  // time of the refusal in refusal_
  std::uint64_t last_connection_ = 0;
  std::unordered_map<ConnectionId, Session> sessions_;
  std::unordered_map<NodeId, Peer> peers_;
  std::vector<HolderView> found_;  // result of the current lookup
  msgpack::sbuffer reply_buffer_;  // reply to the current lookup
};

}  // namespace kvferry::controller
