// Accepts connections. Within a time limit a client must finish the TLS handshake (if this node has a key) and send a
// valid Hello, with the secret from this node's address. Otherwise its connection is closed.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <string>

#include "transport/tcp/connection.h"

namespace kvferry::tcp {

class TcpBackend;

class Acceptor final : public MessageHandler {
 public:
  /// `welcome` is called for each connection whose Hello is valid. It must set another handler for the connection, or
  /// close the connection.
  using Welcome = std::function<void(Connection&, const Hello&)>;
  Acceptor(TcpBackend& host, std::uint64_t incarnation, std::string secret, Welcome welcome);

  /// Adds a connection whose Hello has not arrived yet. If kPendingMax other connections are pending, the oldest of
  /// them is dropped.
  void accept(OwnedFd socket);
  /// Drops connections that have been pending for too long. Returns the time at which check() must be called next.
  TimeNs check(TimeNs now);
  /// Returns the number of connections that failed, were refused or were dropped before their Hello was accepted. Any
  /// thread may call this function.
  std::uint64_t num_refused() const { return num_refused_; }

  Result<void> on_head(Connection& connection, const MessageHead& head) override;
  void on_broken(Connection& connection, const std::string& why) override;

  static constexpr std::size_t kPendingMax = 256;
  // Time limit for the Hello and, with a cluster key, for the TLS handshake before it. If silence_ns is shorter,
  // silence_ns is the limit.
  static constexpr TimeNs kHelloNs = kSecond;

 private:
  struct PendingPeer {
    Connection* connection;
    TimeNs since;
  };
  /// Returns the reason to refuse the peer, or an empty string if its Hello is valid.
  std::string refusal(const MessageHead& head, Hello& hello) const;
  /// Removes the connection from pending_. Returns whether it was there.
  bool remove(const Connection& connection);

  TcpBackend& host_;
  const std::uint64_t incarnation_;
  const std::string secret_;
  const Welcome welcome_;
  std::deque<PendingPeer> pending_;  // connections whose Hello is missing, the oldest first
  std::atomic<std::uint64_t> num_refused_{0};
};

}  // namespace kvferry::tcp
