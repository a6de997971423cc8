// TLS 1.3 on TCP connections between processes of a deployment. OpenSSL's headers are included only by sources.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "transport/base/net/cluster_key.h"
#include "transport/base/result.h"

struct ssl_ctx_st;
struct ssl_st;

namespace kvferry::net {

/// Determines which connections stay encrypted after the handshake. The other connections continue in clear text: a
/// process without the key still can't open such a connection, but a host between the two ends can read and change its
/// bytes.
enum class Encrypt : std::uint8_t { kNever, kBetweenHosts, kAlways };
constexpr std::array<std::string_view, 3> kEncryptNames = {"never", "between_hosts", "always"};
/// Returns the value with this name, nullopt if `name` is none of kEncryptNames.
std::optional<Encrypt> parse_encrypt(std::string_view name);

/// The cluster key and the settings that TLS sessions share. With a list of members the two ends prove who they are by
/// certificates, and without one by the key that they have in common. Threads: any, as long as each session has one
/// owner.
class TlsContext {
 public:
  TlsContext(const ClusterKey& key, Encrypt encrypt);
  ~TlsContext();
  TlsContext(const TlsContext&) = delete;
  TlsContext& operator=(const TlsContext&) = delete;

  const ClusterKey& key() const { return key_; }
  /// Returns the names of the accepted keys. A connection whose key_name() is not among them must be ended.
  std::vector<std::string> key_names() const;
  /// Returns the name of the member with this key (TlsSession::key_name()), or "" if no listed member has it, as for a
  /// holder of the cluster key. Returns nullopt if there is no list of members.
  std::optional<std::string> member_of(std::string_view key_name) const;
  /// Returns the name of the key that new connections use, or "" if there is a list of members.
  std::string key_in_use() const;

 private:
  friend class TlsSession;
  friend struct TlsCallbacks;
  /// Returns whether this side wants the connection encrypted.
  bool wants_encryption(int fd) const;

  ssl_ctx_st* handle_;
  const ClusterKey key_;
  const Encrypt encrypt_;
};

/// One end of a TLS connection. Both ends prove that they have the cluster key, or a listed member's own key, with an
/// ephemeral key exchange, before either reads or writes anything else. The connecting end says whether the connection
/// stays encrypted. The accepting end refuses clear text if its own setting demands encryption. No call blocks.
/// Threads: one owner.
class TlsSession {
 public:
  static constexpr std::size_t kHandshakeBytesMax = 4096;  // a peer whose handshake is longer is refused

  /// `context` and the non-blocking socket `fd` must outlive the session.
  TlsSession(const TlsContext& context, int fd, bool is_server);
  ~TlsSession();
  TlsSession(const TlsSession&) = delete;
  TlsSession& operator=(const TlsSession&) = delete;

  /// Continues the handshake. Returns true if it is done, false if it waits for bytes of the peer or for room in the
  /// socket; the caller then calls it again when the socket is readable or writable. kRefused: the handshake failed,
  /// for example because the peer does not have the cluster key, closed the connection or disagrees about encryption.
  /// kPeerLost: sending failed.
  Result<bool> handshake();
  /// Returns whether the connection stays encrypted. If not, the session is no longer needed, and the caller reads and
  /// writes the socket directly.
  bool encrypts() const { return encrypts_; }
  /// Returns the name of the cluster key that this connection uses, or the public key of the peer's certificate if
  /// members have keys of their own; "" until the name or the public key is known.
  const std::string& key_name() const { return key_name_; }

  /// Like readv() and writev() of a non-blocking socket, except that receive() goes on until `parts` are full or the
  /// socket is empty, and that send() may buffer bytes that it counts as sent.
  ssize_t receive(std::span<const iovec> parts);
  ssize_t send(std::span<const iovec> parts);
  /// Returns whether send() has buffered bytes; another send(), even with empty parts, sends them.
  bool has_unsent() const { return sent_ < out_.size(); }

 private:
  friend struct TlsCallbacks;
  /// Called before the first message of a handshake if there is a list of members.
  void prepare_certificate();
  /// Returns true if the peer has proved who it is and both ends agree about encryption.
  bool has_proof();
  bool encrypt(const iovec& part);
  bool flush();

  const TlsContext& context_;
  const int fd_;
  const bool is_server_;
  const std::shared_ptr<const KeyContent> members_;  // nullptr: there is no list of members
  ssl_st* ssl_;
  bool is_begun_ = false;
  bool is_done_ = false;
  bool is_at_end_ = false;  // whether the peer has closed the connection
  bool encrypts_ = false;
  std::string key_name_;
  std::string identity_;  // what the connecting end sends to choose encryption and the cluster key
  std::size_t handshake_bytes_ = 0;
  std::vector<std::byte> small_;  // joined parts that are shorter than a record
  std::vector<std::byte> out_;    // encrypted records; the first sent_ bytes have been sent
  std::size_t sent_ = 0;
};

}  // namespace kvferry::net
