// The context of ZeroMQ sockets, which also authenticates their clients. ZeroMQ's own headers are included only by
// sources.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "transport/base/net/cluster_key.h"
#include "transport/base/result.h"

namespace kvferry::net {

/// The processes that listen: controllers, which have the cluster key itself, or nodes, which refuse members with the
/// role reader.
enum class Servers : std::uint8_t { kControllers, kNodes };

/// A ZeroMQ context: the I/O thread that the sockets of one process can share. Threads: any.
///
/// With a cluster key, all tcp:// sockets of the context are encrypted and authenticated by CURVE. Without a list of
/// members, all holders of the key derive the same pair of keys from it, and no other process knows even the public
/// key. With a list, each member has a key pair of its own as a client; all nodes have one pair as servers, derived
/// from the cluster key. A connection without such a key ends before a message passes. A server uses the pair of the
/// cluster key in use; a client that accepts two cluster keys tries both in turn. Sockets of other kinds, e.g. ipc://,
/// are neither encrypted nor authenticated.
class ZmqContext {
 public:
  static constexpr int kSocketsMaxDefault = 1023;
  /// `sockets_max`: limit on the sockets, each of which may have a monitor too.
  explicit ZmqContext(int sockets_max = kSocketsMaxDefault, const std::optional<ClusterKey>& key = {},
                      Servers servers = Servers::kControllers);
  ~ZmqContext();  // waits until all sockets are closed
  ZmqContext(const ZmqContext&) = delete;
  ZmqContext& operator=(const ZmqContext&) = delete;
  void* handle() const { return handle_; }
  /// Returns true if the context was made with this cluster key, or without one if `key` is empty.
  bool has_key(const std::optional<ClusterKey>& key) const;

  /// secure_server() prepares a socket that will listen at `endpoint`, and secure_client() a socket that will connect
  /// to it. secure_server() uses the key in use; secure_client() the accepted key after `former`, or the first one if
  /// `former` is empty, not accepted or the last. Both return the server's public key, or "" if the socket needs no
  /// key. kUnavailable: this libzmq was built without CURVE, or no socket is left. kInvalidArgument: the process has a
  /// member's key, which isn't enough to listen here.
  Result<std::string> secure_server(void* socket, std::string_view endpoint);
  Result<std::string> secure_client(void* socket, std::string_view endpoint, std::string_view former = {});

  /// Returns the servers' public keys, one for each accepted cluster key, that of the key in use first.
  std::vector<std::string> public_keys() const;
  /// Returns who has the public key `user_id` (in hexadecimal), which the authentication has recorded for a connection,
  /// or nullopt if that key is not accepted (any more).
  std::optional<Identity> identity_of(std::string_view user_id) const;
  /// Returns whether there is a list of members.
  bool has_members() const { return key_ && key_->content()->members; }
  /// Returns ClusterKey::version(), or 0 if there is no key.
  std::uint64_t key_version() const { return key_ ? key_->version() : 0; }

 private:
  /// Keys in Z85, the text form that ZeroMQ's options take. `server_secret` is empty if the servers are controllers and
  /// this process has a member's key, which does not make it a controller.
  struct CurveKeys {
    std::string server_public, server_secret;
    std::string own_public, own_secret;
  };
  /// Returns the keys for each accepted cluster key, those of the key in use first; empty: there is no key, or this
  /// libzmq has no CURVE.
  std::vector<CurveKeys> curve_keys() const;
  void authenticate(void* socket) const;
  Result<void> start_authenticator();

  void* handle_;
  const std::optional<ClusterKey> key_;
  const Servers servers_;
  std::mutex mutex_;
  std::thread authenticator_;  // guarded by mutex_; runs from the first server until the context ends
};

}  // namespace kvferry::net
