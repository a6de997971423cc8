// Which connection speaks for which node, and what the controller answers: the protocol over a directory, without
// sockets and without a clock.
#pragma once

#include <cstdint>
#include <msgpack.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "controller/directory/directory.h"
#include "controller/directory/orders.h"
#include "controller/api/status.h"
#include "transport/base/clock.h"
#include "transport/base/ids.h"
#include "transport/base/versions.h"

namespace kvferry::controller {

namespace wire {
struct Hello;
struct Heartbeat;
struct Publish;
struct Evict;
struct Lookup;
struct LookupFields;
struct Leave;
struct AdminRequest;
struct StatusRequest;
}  // namespace wire

class SessionObserver;

/// One connection of one front, for as long as the front knows it. Never used again.
using ConnectionId = StrongId<struct ConnectionIdTag, std::uint64_t>;

/// Where answers go; a front has one.
class ReplySender {
 public:
  virtual ~ReplySender() = default;
  /// One message. False: the connection is gone, or its peer doesn't read; the message is dropped. Never blocks, never
  /// throws.
  virtual bool send(ConnectionId to, std::string_view bytes) = 0;
};

/// Of all fronts together: a node may come back over another one.
/// Whatever a peer sends, this goes on: a malformed message is counted and dropped, a message of another protocol
/// version is refused in a sentence. Threads: the directory's owner. `now` must never go back.
class Sessions {
 public:
  /// `protocol`: the versions that it speaks; none: what this release does.
  Sessions(const DirectoryOptions& options, TimeNs now, VersionRange protocol = {});

  /// Of a new connection.
  ConnectionId open() { return ConnectionId{++last_connection_}; }

  /// One message; its answers go to `replies` before this returns.
  void take(ConnectionId from, std::string_view bytes, TimeNs now, ReplySender& replies);
  /// Knows the names of nodes that the directory knows from before a restart.
  void adopt_nodes();
  /// The connection is over. Its node stays until its lease ends, or says Hello on another one.
  void disconnected(ConnectionId connection);
  /// Forgets the silent, see Directory::expire(), and sends nodes what they are asked to do.
  void expire(TimeNs now);
  Status status(TimeNs now) const;
  /// Is asked and told from here on, until it is unset; nullptr: nobody.
  void set_observer(SessionObserver* tap) { observer_ = tap; }
  /// A rule that was asked for at another replica.
  void obey(const wire::AdminRequest& request, TimeNs now);
  /// Forgets a node whose newer incarnation speaks elsewhere.
  void fence(NodeId node, TimeNs now);

  struct Session {
    NodeId node;
    Incarnation incarnation;
    std::uint64_t told_replicas = 0;  // the version of their list
  };
  /// nullptr: no registered node speaks on it. Valid until the next call that isn't const.
  const Session* session(ConnectionId connection) const;
  std::size_t num_sessions() const { return sessions_.size(); }

  Directory& directory() { return directory_; }
  const Counters& counters() const { return counters_; }
  /// For what a front itself can't read. `story`: what is wrong with it.
  void count_malformed(std::string_view story);
  void count_dropped_reply() { ++counters_.replies_dropped; }

 private:
  struct Peer {
    std::optional<ConnectionId> connection;  // none: it broke
    ReplySender* replies = nullptr;                // of the connection
    std::string name;                        // for logs
    std::uint32_t version = 0;               // of the protocol, that it speaks
  };
  /// Whom the message in hand came from, and when.
  struct Turn {
    ConnectionId from;
    TimeNs now;
    ReplySender& replies;
    std::string_view bytes{};
    std::uint32_t version = 0;  // of the protocol, that it is in
  };

  void on(const Turn& turn, const wire::Hello& hello);
  void on(const Turn& turn, const wire::Heartbeat& heartbeat);
  void on(const Turn& turn, const wire::Publish& publish);
  void on(const Turn& turn, const wire::Evict& evict);
  void on(const Turn& turn, const wire::Lookup& lookup);
  void on(const Turn& turn, const wire::LookupFields& lookup);
  void on(const Turn& turn, const wire::Leave& leave);
  void on(const Turn& turn, const wire::AdminRequest& request);
  void on(const Turn& turn, const wire::StatusRequest&);
  /// What only a controller sends.
  template <class T>
  void on(const Turn&, const T&) {
    count_malformed("a controller's own kind of message");
  }

  const Session* session_of(const Turn& turn, std::uint64_t incarnation);
  std::optional<std::string> refusal(const wire::Hello& hello, const NodeInfo& info) const;
  void begin_session(const Turn& turn, NodeId node, const NodeInfo& info);
  void end_session(NodeId node, TimeNs now);
  void send_unregistered(const Turn& turn, std::uint64_t incarnation);
  void want_repair(const Turn& turn, const Session& session);
  void send_orders();
  std::string_view name_of(NodeId node) const;
  template <class T>
  void reply(const Turn& turn, const T& message);
  void count_reply(bool is_sent) { ++(is_sent ? counters_.messages_sent : counters_.replies_dropped); }

  VersionRange protocol_;
  Directory directory_;
  Orders orders_;
  SessionObserver* observer_ = nullptr;
  TimeNs started_at_;
  Counters counters_;
  std::uint64_t last_connection_ = 0;
  std::unordered_map<ConnectionId, Session> sessions_;
  std::unordered_map<NodeId, Peer> peers_;
  std::vector<FoundHolder> found_;  // of the look-up in hand, and its answer
  msgpack::sbuffer answer_;
};

}  // namespace kvferry::controller
