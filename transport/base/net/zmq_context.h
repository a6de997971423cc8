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

/// A ZeroMQ context: the I/O thread that the sockets of one process can share. Threads: any.
///
/// With a cluster key, all tcp:// sockets of the context are encrypted and authenticated by CURVE. All members of a
/// deployment derive the same pair of keys from the cluster key; no other process knows even its public key. A
/// connection without the key ends before a message passes. A server has the pair of the key in use; a client that
/// accepts two keys tries both in turn. Sockets of other kinds, e.g. ipc://, are neither
/// encrypted nor authenticated.
class ZmqContext {
 public:
  static constexpr int kSocketsMaxDefault = 1023;
  explicit ZmqContext(int sockets_max = kSocketsMaxDefault, const std::optional<ClusterKey>& key = {});
  ~ZmqContext();  // waits until all sockets are closed
  ZmqContext(const ZmqContext&) = delete;
  ZmqContext& operator=(const ZmqContext&) = delete;
  void* handle() const { return handle_; }
  /// Returns true if the context was made with this cluster key, or without one if `key` is empty.
  bool has_key(const std::optional<ClusterKey>& key) const;

  /// secure_server() prepares a socket that will listen at `endpoint`, and secure_client() a socket that will connect
  /// to it. secure_server() uses the key in use; secure_client() the accepted key that follows `former`, the first one
  /// if `former` is not accepted or empty. Both return the public key that the socket has now, or "" if it needs none.
  /// kUnavailable: this libzmq was built without CURVE, or no socket is left.
  Result<std::string> secure_server(void* socket, std::string_view endpoint);
  Result<std::string> secure_client(void* socket, std::string_view endpoint, std::string_view former = {});

  /// Returns the public keys of the accepted cluster keys, that of the key in use first.
  std::vector<std::string> public_keys() const;
  /// Returns ClusterKey::version(), or 0 if there is no key.
  std::uint64_t key_version() const { return key_ ? key_->version() : 0; }

 private:
  struct CurveKeys {  // both in Z85, the text form that ZeroMQ's options take
    std::string public_key, secret_key;
  };
  /// Returns the pairs of the accepted keys, the pair of the key in use first; empty: this libzmq has no CURVE.
  std::vector<CurveKeys> curve_keys() const;
  void authenticate(void* socket) const;
  Result<void> start_authenticator();

  void* handle_;
  const std::optional<ClusterKey> key_;
  std::mutex mutex_;
  std::thread authenticator_;  // guarded by mutex_; runs from the first server until the context ends
};

}  // namespace kvferry::net
