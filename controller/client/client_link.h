// Connections to controllers that carry whole messages and reconnect by themselves, and the clients that use them.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "controller/api/client.h"
#include "transport/base/clock.h"
#include "transport/base/net/zmq_socket.h"
#include "transport/base/result.h"

namespace kvferry::controller {

/// A connection to one controller. Messages that are sent while the connection is down are dropped: if they were
/// stored, a restarted controller could receive them when they are out of date. Threads: one owner.
class ClientLink {
 public:
  virtual ~ClientLink() = default;

  /// Returns a descriptor, for polling only, that becomes readable when a message arrives or a connection is made.
  virtual int fd() const = 0;
  /// Continues connecting and sending. Called once in each turn of the owner's loop, whether or not fd() is readable.
  virtual void process(TimeNs now) = 0;
  /// Returns the next message, valid until the next call of any function of this link, or nullopt if none is waiting.
  virtual std::optional<std::string_view> receive() = 0;
  /// Sends a message. Returns false if the message was dropped because there is no connection or the send queue is
  /// full.
  virtual bool send(std::string_view message) = 0;
  /// While corked, messages may be delayed, so that many small ones are sent in one write.
  virtual void set_corked(bool is_corked) = 0;
  /// Replaces a silent connection by a new one.
  virtual void reconnect() = 0;
  /// Returns true once after a connection broke, if the link noticed it.
  virtual bool has_broken() = 0;
  /// Sets how long the destructor waits for queued messages to be sent.
  virtual void linger(int ms) = 0;
};

struct LinkOptions {
  bool is_bounded = true;  // true: a received message of more than kMessageBytesMax ends the connection
  // Context that many ZeroMQ links share to save threads; its sockets have the context's cluster key. nullptr: the link
  // makes a context of its own.
  std::shared_ptr<net::ZmqContext> zmq_context{};
  std::optional<net::ClusterKey> cluster_key{};  // the controller's key; empty: the controller has none
};
/// kInvalidArgument: `endpoint` is malformed, or is stream:// and there is a cluster key, or the shared context has
/// another cluster key. kUnavailable: no connection can be opened, e.g. because no file descriptor is left.
Result<std::unique_ptr<ClientLink>> make_link(const std::string& endpoint, const LinkOptions& options = {});

/// Returns text to append to the error "not reachable", which says how a cluster key can be the cause. `has_key`: this
/// process has a cluster key.
std::string_view cluster_key_hint(bool has_key);

/// Makes a client of the controller that `link` connects to.
std::unique_ptr<Client> make_client_over(std::unique_ptr<ClientLink> link, ClientOptions options);

/// Makes a client of one or more controllers (replicas). `clients` has one client for each controller, the preferred
/// controller first, and must not be empty. The node registers with each controller and publishes everything to each.
/// Lookups go to the first controller in this order that the node is registered with. When that controller is lost,
/// unanswered lookups are sent to another one; with lookup_timeout_ms also after each third of this time. The client
/// reports Registered as soon as one controller has registered the node, Lost when the node is no longer registered
/// with any controller, and Refused when all have refused it. The answer to a SnapshotWanted goes to all controllers,
/// which does no harm to those that did not request it. With lookup_timeout_ms each lookup ends in LookupReply or
/// LookupFailed, even if the node is not registered at first or an answer is lost. kUnavailable: no file descriptor is
/// left.
Result<std::unique_ptr<Client>> make_replica_client(std::vector<std::unique_ptr<Client>> clients,
                                                    const ClientOptions& options);

/// `endpoint` must have passed check_endpoint().
Result<std::unique_ptr<ClientLink>> make_zmq_link(const std::string& endpoint, const LinkOptions& options);
Result<std::unique_ptr<ClientLink>> make_stream_link(const std::string& endpoint, const LinkOptions& options);

}  // namespace kvferry::controller
