// The secret in a transport's address. A peer shows it, and so proves that it was given the address; with a list of
// members it also proves to whom.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "transport/base/net/cluster_key.h"
#include "transport/base/result.h"

namespace kvferry {

/// Why a peer with SecretCheck::Kind::kRevoked is refused.
constexpr std::string_view kAddressRevoked =
    "this address was given to a process whose key the peer does not accept: it was revoked or replaced, or the peer "
    "has not read the newest list of members yet";

/// What the owner of an address knows of a peer that has shown a secret.
struct SecretCheck {
  enum class Kind {
    kUnknown,  // the secret is not of this address
    kRevoked,  // the address was given to a process whose key is not accepted (any more)
    kAccepted
  } kind = Kind::kUnknown;
  // Name of the member to which the address was given, as AskingMember (transfer_table.h). No value: there is no list.
  std::optional<std::string> member = {};
  bool is_accepted() const { return kind == Kind::kAccepted; }
};

/// The secret in the address of one transport: random bytes. Without a list of members, each process that gets the
/// address gets this root secret. With a list, only the scheduler of the transport's own engine has it; every other
/// process gets a secret of its own, which follows from the root secret and from the process's public CURVE key. So the
/// transport knows by which key a peer was given the address, and refuses the peer once that key is not accepted.
/// Threads: any.
class AddressSecret {
 public:
  explicit AddressSecret(std::optional<net::ClusterKey> key);

  const std::string& root() const { return root_; }
  /// Returns the secret of the process with this public CURVE key, which is in hexadecimal.
  static std::string personal(std::string_view root, std::string_view curve_key);
  SecretCheck check(std::string_view shown) const;
  /// Returns whether what check() returns can change; if so, it changes only with key_version().
  bool can_change() const { return key_ && key_->has_file(); }
  std::uint64_t key_version() const { return key_ ? key_->version() : 0; }

 private:
  const std::optional<net::ClusterKey> key_;
  const std::string root_;
};

/// A function that returns a secret to be put into an address instead of `root`.
using SecretChange = std::function<std::string(const std::string& root)>;
/// Return the address of a transport of the backend with another secret. kInvalidArgument: the address is malformed or
/// of another protocol version.
Result<std::string> change_shm_secret(const std::string& address, const SecretChange& change);
Result<std::string> change_ucx_secret(const std::string& address, const SecretChange& change);
Result<std::string> change_gpu_ipc_secret(const std::string& address, const SecretChange& change);
/// The same for an address of make_transport(), whose parts for TCP and NCCL stay as they are: these backends know a
/// peer by the certificate with which it opens a TCP connection.
Result<std::string> change_secrets(const std::string& address, const SecretChange& change);

/// Returns an address without its secrets if there is a key, otherwise the whole address. The result names the sender
/// of notifications to peers, which must not learn the root secret. `address`: an own address.
template <class Change>
std::string source_address(const std::optional<net::ClusterKey>& key, const std::string& address, Change change) {
  return key ? change(address, [](const std::string&) { return std::string(); }).value() : address;
}

}  // namespace kvferry
