// The cluster key, a secret that the processes of a deployment share, or in its place one member's own key. `kvferry
// keygen` writes both.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "transport/base/clock.h"
#include "transport/base/net/members.h"
#include "transport/base/result.h"

namespace kvferry::net {

/// The content of a key file, and of the list of members in the same folder, at one moment.
struct KeyContent {
  std::vector<std::string> keys{};  // accepted cluster keys, the one in use first; empty if `own` is set
  std::optional<MemberKey> own{};   // the member's key, if this process is a member
  // The listed members. Without a list there is no value, and every process that has the cluster key is accepted.
  std::optional<std::vector<Member>> members{};
  bool operator==(const KeyContent&) const = default;

  /// Returns the secrets that this process shares with nodes, one for each accepted cluster key, the one in use first:
  /// MemberKey::Shared::secret if `own` is set; otherwise, if there is a list of members, node_secret() of the cluster
  /// key; otherwise the cluster key itself.
  std::vector<std::string> node_secrets() const;
  /// Returns the secret key of this process's certificate.
  Bytes32 own_certificate() const;
  /// Returns the public keys, 32 bytes each, of the certificates that nodes accept.
  std::vector<std::string> node_certificates() const;
  /// Returns the listed members and the holders of the cluster keys, by public CURVE key in hexadecimal.
  std::map<std::string, Identity, std::less<>> identities() const;
};

/// The cluster key. It is used only to derive a key for each purpose, so that no derived key reveals anything about
/// another one.
///
/// While the key is being rotated, its file has two keys: the first one is in use, and both are accepted. The README.md
/// of this folder says what each protocol does with them. If the key was read from a file, a thread reads the file
/// again every kLookEveryNs. The thread uses a new content only after two equal reads, so that no half-copied file is
/// used; a file that can't be used is logged once, and the former keys stay. The list of members is read in the same
/// way. Copies of a ClusterKey share its keys. Threads: any.
class ClusterKey {
 public:
  static constexpr std::size_t kBytesMin = 32, kBytesMax = 65536;
  static constexpr std::size_t kKeysMax = 2;
  static constexpr TimeNs kLookEveryNs = 200 * kMillisecond;
  using Derived = Bytes32;

  /// Makes a key that is in no file and never changes.
  explicit ClusterKey(std::string bytes);

  /// Returns HMAC-SHA256 of `purpose` under the key in use or, if this is a member's key, under
  /// MemberKey::Shared::secret.
  Derived derived(std::string_view purpose) const;
  /// Returns the keys accepted at this moment, the key in use first; they don't follow the file. Empty: this is a
  /// member's key.
  std::vector<ClusterKey> accepted() const;
  /// Returns KeyContent::node_secrets() as keys, which don't follow the file.
  std::vector<ClusterKey> accepted_by_nodes() const;
  std::shared_ptr<const KeyContent> content() const;
  /// Returns who has the public CURVE key `curve_key`, which is in hexadecimal, or nullopt if the key is not accepted.
  std::optional<Identity> identity_of(std::string_view curve_key) const;
  /// Returns who this process is.
  Identity own_identity() const;
  /// Returns a number that changes with the keys. Owners of connections compare it regularly, to end connections whose
  /// key is no longer accepted.
  std::uint64_t version() const;
  bool has_file() const;
  /// Returns whether both have the same secret in use (the first of KeyContent::node_secrets()) and the same member's
  /// key, or are copies of one key.
  friend bool operator==(const ClusterKey& a, const ClusterKey& b);

 private:
  friend Result<std::optional<ClusterKey>> read_cluster_key(const std::string& file);
  class Keys;
  explicit ClusterKey(std::shared_ptr<Keys> keys) : keys_(std::move(keys)) {}
  std::shared_ptr<Keys> keys_;
};

/// Returns the keys in the bytes of a file, the key in use first: the whole content is one key, or the content is what
/// format_cluster_keys() makes of two. kInvalidArgument: a key is too short or too long, or a list does not consist of
/// two different keys in hexadecimal.
Result<std::vector<std::string>> parse_cluster_keys(std::string_view content);
/// Returns the content of a file with these keys.
std::string format_cluster_keys(const std::vector<std::string>& keys);
/// Returns the content of a key file. kInvalidArgument: the file can't be read, is not a regular file, has a mode other
/// than 0600 and 0400, or is too long.
Result<std::string> read_key_file(const std::string& file);
/// Returns the list of members of the deployment with this key file, or nullopt if there is none. kInvalidArgument: the
/// list can't be read, or others than its owner can write it, or parse_members() rejects it.
Result<std::optional<std::vector<Member>>> read_members(const std::string& key_file);

/// Returns the key in the file, or nullopt if the name `file` is empty, which means that no key is configured. The key
/// follows changes of the file. kInvalidArgument: the errors of read_key_file(), parse_cluster_keys(),
/// parse_member_key() and read_members(), or the key of a worker or admin has no list of members beside it.
Result<std::optional<ClusterKey>> read_cluster_key(const std::string& file);

}  // namespace kvferry::net
