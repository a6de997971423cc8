// Connections to controllers that carry whole messages and reconnect by themselves, and the clients made of them.
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

/// Messages sent without a connection are dropped, never stored for the next one: they would reach a restarted
/// controller out of date. Threads: one owner.
class ClientLink {
 public:
  virtual ~ClientLink() = default;

  /// Readable while process() or receive() has work to do; for polling only.
  virtual int fd() const = 0;
  /// Continues connecting and sending. Called once in each turn of the owner, whether or not fd() is readable.
  virtual void process(TimeNs now) = 0;
  /// The next message, valid until the next call of any function. Returns nullopt if none is waiting.
  virtual std::optional<std::string_view> receive() = 0;
  /// Returns false if the message was dropped: there is no connection, or the send queue is full.
  virtual bool send(std::string_view message) = 0;
  /// While corked, messages may be delayed, so that many small ones leave in one write.
  virtual void set_corked(bool is_corked) = 0;
  /// Replaces a silent connection by a new one.
  virtual void reconnect() = 0;
  /// Returns true once for each connection that was seen to break.
  virtual bool has_broken() = 0;
  /// Time that the destructor waits for sent messages to leave.
  virtual void linger(int ms) = 0;
};

struct LinkOptions {
  bool is_bounded = true;  // refuse messages of more than kMessageBytesMax
  // Shared by many ZeroMQ links to save threads; nullptr: a context of its own.
  std::shared_ptr<net::ZmqContext> zmq_context{};
  std::optional<net::ClusterKey> cluster_key{};  // for a context of the link's own
};
/// kInvalidArgument: `endpoint` is malformed, or is stream:// and there is a cluster key; kUnavailable: no file
/// descriptor is left.
Result<std::unique_ptr<ClientLink>> make_link(const std::string& endpoint, const LinkOptions& options = {});

/// What a peer's silence may mean besides an absent controller, to follow "not reachable".
std::string_view cluster_key_hint(bool has_key);

/// A client of the controller that `link` connects to.
std::unique_ptr<Client> make_client_over(std::unique_ptr<ClientLink> link, ClientOptions options);

/// A client of several controllers (replicas), made of one client for each, in order of preference; at least one.
/// The node registers with each controller and publishes everything to each. Lookups go to the first controller that
/// it is registered with; when that one is lost, unanswered lookups are sent to the next. Registered is reported for
/// the first controller, Lost for the last one, Refused when all have refused. The answer to a SnapshotWanted goes to
/// all controllers, which changes nothing for those that did not ask for it.
/// With lookup_timeout_ms each lookup ends in LookupReply or LookupFailed, even if no controller is registered at first
/// or an answer is lost.
Result<std::unique_ptr<Client>> make_replica_client(std::vector<std::unique_ptr<Client>> clients,
                                                    const ClientOptions& options);

/// `endpoint` must have passed check_endpoint().
Result<std::unique_ptr<ClientLink>> make_zmq_link(const std::string& endpoint, const LinkOptions& options);
Result<std::unique_ptr<ClientLink>> make_stream_link(const std::string& endpoint, const LinkOptions& options);

}  // namespace kvferry::controller
