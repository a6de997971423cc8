// ZeroMQ sockets as the runtime needs them: bytes in, bytes out, nothing blocks, nothing throws.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "transport/base/result.h"

namespace kvferry {

/// Threads: one owner per socket. fd() is edge-triggered: after it fires, receive until nullopt.
class ServerSocket {
 public:
  /// kUnavailable: the address can't be bound ("port in use"). Port 0 takes a free one.
  static Result<std::unique_ptr<ServerSocket>> bind(const std::string& endpoint);
  ~ServerSocket();
  const std::string& endpoint() const { return endpoint_; }  // as bound
  int fd() const;
  struct Message {
    std::string sender;
    std::string bytes;
  };
  std::optional<Message> receive();
  /// False: the sender is gone or its queue is full; the message is dropped.
  bool send(const std::string& to, std::string_view bytes);

 private:
  struct Impl;
  explicit ServerSocket(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
  std::string endpoint_;
};

class ClientSocket {
 public:
  /// kInvalidArgument: not an address. Connects in the background, again and again.
  static Result<std::unique_ptr<ClientSocket>> connect(const std::string& endpoint);
  ~ClientSocket();
  int fd() const;
  std::optional<std::string> receive();
  bool send(std::string_view bytes);

 private:
  struct Impl;
  explicit ClientSocket(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvferry
