// The ZeroMQ sockets between nodes, and between a scheduler node and its workers. Without a cluster key all these
// sockets share one ZeroMQ context.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "transport/base/net/zmq_socket.h"

namespace kvferry {

using ZmqContextRef = std::shared_ptr<net::ZmqContext>;  // nullptr: the context that the process's sockets share

/// A socket that receives messages of any number of clients, and can answer each. Not thread-safe. When fd() becomes
/// readable, the caller must call receive() until receive() returns nullopt.
class ServerSocket {
 public:
  /// Listens on `endpoint`. Port 0 or "*" selects a free port. Over TCP, a peer that sends more than 8 MiB in one
  /// message is disconnected, and send() drops messages if 1000 wait. On any other endpoint, where the scheduler node
  /// of this engine connects, any number of messages may wait. Errors: those of net::ZmqSocket::make() and bind(), for
  /// example kUnavailable if the address cannot be bound ("Address already in use").
  static Result<std::unique_ptr<ServerSocket>> bind(const std::string& endpoint, const ZmqContextRef& context = {});
  const std::string& endpoint() const { return socket_->endpoint(); }  // Returns the endpoint, with the port in use.
  const ZmqContextRef& context() const { return socket_->context(); }
  int fd() const { return socket_->fd(); }
  struct Message {
    std::string sender;
    std::string bytes;
    std::string member;          // the sender's name as a member of the cluster (net::Identity); empty: it has none
    std::string curve_key = {};  // net::ZmqSocket::curve_key_of() the sender
  };
  /// Returns the next message. Skips malformed messages, and those of members that have been revoked or have the role
  /// reader.
  std::optional<Message> receive();
  /// Returns false, and drops the message, if the receiver has disconnected or its queue is full.
  bool send(const std::string& to, std::string_view bytes);

 private:
  explicit ServerSocket(std::unique_ptr<net::ZmqSocket> socket) : socket_(std::move(socket)) {}
  std::unique_ptr<net::ZmqSocket> socket_;
};

class ClientSocket {
 public:
  /// Connects and reconnects in the background. `is_own`: the server is a worker of this engine, so any number of
  /// messages may wait; otherwise send() drops messages if 1000 wait. Errors: those of net::ZmqSocket::make() and
  /// connect(), for example kInvalidArgument if `endpoint` is malformed.
  static Result<std::unique_ptr<ClientSocket>> connect(const std::string& endpoint, const ZmqContextRef& context = {},
                                                       bool is_own = false);
  int fd() const { return socket_->fd(); }
  std::optional<std::string> receive();
  bool send(std::string_view bytes) { return socket_->send(bytes); }

 private:
  explicit ClientSocket(std::unique_ptr<net::ZmqSocket> socket) : socket_(std::move(socket)) {}
  std::unique_ptr<net::ZmqSocket> socket_;
};

}  // namespace kvferry
