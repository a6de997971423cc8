// A connection to one controller that carries whole messages and comes back by itself.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "controller/api/client.h"
#include "transport/base/clock.h"
#include "transport/base/result.h"

namespace kvferry::controller {

/// What is sent without a connection is gone, never kept for the next one: it would reach a restarted controller as old
/// news. Threads: one owner.
class ClientLink {
 public:
  virtual ~ClientLink() = default;

  /// Readable until process() and receive() have taken in what waits; poll it, don't read it.
  virtual int fd() const = 0;
  /// Goes on with connecting and sending. Once in each turn of the owner, also if fd() says nothing.
  virtual void process(TimeNs now) = 0;
  /// The next message, valid until the next call of any kind. None: nothing waits.
  virtual std::optional<std::string_view> receive() = 0;
  /// False: no connection, or no room.
  virtual bool send(std::string_view message) = 0;
  /// While held, what is sent may wait for the end of it, so that many small messages go out as one.
  virtual void hold(bool is_held) = 0;
  /// Gives up a connection that is silent for a new one.
  virtual void reconnect() = 0;
  /// True once for each connection that broke and was seen to.
  virtual bool has_broken() = 0;
  /// How long the destructor waits for what was sent to get out.
  virtual void linger(int ms) = 0;
};

/// What ZeroMQ's links of a process may share, so that a thousand of them don't take two thousand threads. Threads:
/// any.
class ZmqThreads;
/// `sockets_max`: links that may share it.
std::shared_ptr<ZmqThreads> make_zmq_threads(int sockets_max);

struct LinkOptions {
  bool is_bounded = true;                     // no message of more than kMessageBytesMax is taken
  std::shared_ptr<ZmqThreads> zmq_threads{};  // none: of its own
};
/// kInvalidArgument: not an endpoint; kUnavailable: no file descriptor is left.
Result<std::unique_ptr<ClientLink>> make_link(const std::string& endpoint, LinkOptions options = {});

/// A client of the one controller that `link` leads to.
std::unique_ptr<Client> make_client_over(std::unique_ptr<ClientLink> link, ClientOptions options);

/// The two kinds of it that are sockets. The endpoint was checked.
Result<std::unique_ptr<ClientLink>> make_zmq_link(const std::string& endpoint, LinkOptions options);
Result<std::unique_ptr<ClientLink>> make_stream_link(const std::string& endpoint, LinkOptions options);

}  // namespace kvferry::controller
