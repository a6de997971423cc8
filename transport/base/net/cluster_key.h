// The key that only the members of a deployment have, or a member's own key in its place. `kvferry keygen` writes both.
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

/// What a key file, and the list of members beside it, say at one moment.
struct KeyContent {
  std::vector<std::string> keys{};  // the accepted keys, the key in use first; empty for a member
  std::optional<MemberKey> own{};   // the member's key, if this process is a member
  // Without a list the holders of the cluster key are all members.
  std::optional<std::vector<Member>> members{};
  bool operator==(const KeyContent&) const = default;

  /// Returns the secrets that nodes share, the one in use first: the keys themselves if there are no members.
  std::vector<std::string> node_secrets() const;
  /// Returns the secret key of this process's certificate.
  Bytes32 own_certificate() const;
  /// Returns the public keys, 32 bytes each, of those whose certificates open connections between nodes.
  std::vector<std::string> node_certificates() const;
  /// Returns the peers that may connect, by public CURVE key in hexadecimal.
  std::map<std::string, Identity, std::less<>> identities() const;
};

/// The key is used only to derive a key for each purpose, so that no derived key reveals anything about another one.
///
/// While the key is being rotated, its file has two keys: a process uses the first for what it sends and connects, and
/// accepts both from others. A ClusterKey that was read from a file follows it: a thread reads the file every
/// kLookEveryNs. What two looks have found is taken, so that a file that is being copied is not; a file that can't be
/// used is logged once, and the former keys stay. The list of members is followed in the same way. Copies of a
/// ClusterKey share its keys. Threads: any.
class ClusterKey {
 public:
  static constexpr std::size_t kBytesMin = 32, kBytesMax = 65536;
  static constexpr std::size_t kKeysMax = 2;
  static constexpr TimeNs kLookEveryNs = 200 * kMillisecond;
  using Derived = Bytes32;

  /// Makes a key that is in no file and never changes.
  explicit ClusterKey(std::string bytes);

  /// Returns HMAC-SHA256 of `purpose` under the key in use, or under what a member has in its place.
  Derived derived(std::string_view purpose) const;
  /// Returns the accepted keys at this moment, the key in use first. They don't change. Empty: this is a member's key.
  std::vector<ClusterKey> accepted() const;
  /// Returns what nodes share instead, see KeyContent::node_secrets().
  std::vector<ClusterKey> accepted_by_nodes() const;
  std::shared_ptr<const KeyContent> content() const;
  /// Returns who has this public CURVE key, in hexadecimal, or nullopt if the key was removed.
  std::optional<Identity> identity_of(std::string_view curve_key) const;
  /// Returns who this process is.
  Identity own_identity() const;
  /// Returns a number that changes with the keys. Who owns connections compares it at least every kLookEveryNs.
  std::uint64_t version() const;
  bool has_file() const;
  /// Returns whether both have the same key in use, or are copies of one key.
  friend bool operator==(const ClusterKey& a, const ClusterKey& b);

 private:
  friend Result<std::optional<ClusterKey>> read_cluster_key(const std::string& file);
  class Keys;
  explicit ClusterKey(std::shared_ptr<Keys> keys) : keys_(std::move(keys)) {}
  std::shared_ptr<Keys> keys_;
};

/// Returns the keys in the bytes of a file, the key in use first: the whole content is one key, or the content is what
/// format_cluster_keys() makes of two. kInvalidArgument: a key is too short or too long, or there are not two in a
/// list.
Result<std::vector<std::string>> parse_cluster_keys(std::string_view content);
/// Returns the content of a file with these keys.
std::string format_cluster_keys(const std::vector<std::string>& keys);
/// Returns the content of a key file. kInvalidArgument: the file can't be read, has a mode other than 0600 and 0400, or
/// is too long.
Result<std::string> read_key_file(const std::string& file);
/// Returns the list of members of the deployment with this key file, or nullopt if there is none. kInvalidArgument: the
/// list can't be read, or others than its owner can write it, or parse_members() can't read it.
Result<std::optional<std::vector<Member>>> read_members(const std::string& key_file);

/// Returns the key in the file, which it follows, or nullopt if the name `file` is empty, which means that no key is
/// configured. kInvalidArgument: the errors of read_key_file(), parse_cluster_keys(), parse_member_key() and
/// read_members(), or a worker has no list of members.
Result<std::optional<ClusterKey>> read_cluster_key(const std::string& file);

}  // namespace kvferry::net
