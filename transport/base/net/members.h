// Members with names, roles and keys of their own, in place of one key for all. `kvferry keygen --add-node` makes them.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "transport/base/net/derived_keys.h"
#include "transport/base/result.h"

namespace kvferry::net {

/// What a member may do. Each role includes the rights of the roles before it.
enum class Role : std::uint8_t {
  kNone,    // allows nothing; role of a process whose key is not accepted, e.g. of a revoked member
  kReader,  // role of routers and dashboards: ask the controller for its status and which nodes hold a prompt
  kWorker,  // role of nodes: register, publish, read and write KV
  kAdmin,   // role of operators, and of holders of the cluster key itself: drain, clear, set quotas
};
constexpr std::array<std::string_view, 4> kRoleNames = {"none", "reader", "worker", "admin"};
constexpr std::string_view name_of(Role role) { return kRoleNames[static_cast<std::size_t>(role)]; }

/// Who a process is, for example the sender of a message. An empty name: the holder of the cluster key, a process that
/// needs no key or, with the role kNone, a process whose key is not accepted.
struct Identity {
  std::string name{};
  Role role = Role::kAdmin;
  bool operator==(const Identity&) const = default;
  /// Returns "member 'NAME' (role ROLE)" or "the holder of the cluster key".
  std::string str() const;
  /// Returns whether a node of this process may have this engine id; does not check the role. A member's engine id must
  /// be the member's name, or begin with that name and "_" or "."; the holder of the cluster key may use any engine id.
  bool owns(std::string_view engine_id) const;
};

/// A line of the list of members: what other members know of a member.
struct Member {
  Identity identity{};
  Bytes32 curve{}, certificate{};  // the member's public keys
  Bytes32 token_hash{};            // SHA-256 of the member's token for the controller's HTTP API
  bool operator==(const Member&) const = default;
};

/// The content of a member's own key file, which takes the place of the cluster key.
struct MemberKey {
  /// What a member's key file contains for each accepted cluster key.
  struct Shared {
    Bytes32 controller{};   // public CURVE key of holders of the cluster key, e.g. of controllers
    Bytes32 certificate{};  // public key in the certificates of holders of the cluster key
    Bytes32 secret{};       // node_secret() for workers and admins, router_secret() for readers
    bool operator==(const Shared&) const = default;
  };
  Identity identity{};
  Bytes32 secret{};              // random; only this member has it
  std::vector<Shared> shared{};  // one for each accepted cluster key, that of the cluster key in use first
  bool operator==(const MemberKey&) const = default;

  Bytes32 curve_secret() const;
  Bytes32 certificate_secret() const;
  std::string http_token() const;  // Returns 64 hexadecimal digits.
};

/// curve_secret() and certificate_secret() return secret keys of the holder of a cluster key. The secret keys
/// of a member are derived from its own secret in the same way.
Bytes32 curve_secret(std::string_view cluster_key);
Bytes32 certificate_secret(std::string_view cluster_key);
/// Returns the secret that takes the cluster key's place between nodes as soon as there is a list of members.
Bytes32 node_secret(std::string_view cluster_key);
/// Returns the secret that every process with a key has if there is a list of members. Routers derive the salts of
/// tenants from it.
Bytes32 router_secret(const Bytes32& node_secret);

Member public_of(const MemberKey& key);
/// Returns what the key file of a member of this role contains for each cluster key, the key in use first.
std::vector<MemberKey::Shared> shared_with(Role role, const std::vector<std::string>& cluster_keys);

/// Returns whether `name` can be a member's name: 1 to 63 letters, digits and "-".
bool is_member_name(std::string_view name);
/// Returns the path of the list of members that belongs to `key_file`: kvferry.members in the same folder.
std::string members_file_of(const std::string& key_file);

/// format_members() and parse_members() write and read the list of members; the functions after them are for a member's
/// key file. Errors of both parsers: kInvalidArgument; the message does not name the file.
std::string format_members(const std::vector<Member>& members);
Result<std::vector<Member>> parse_members(std::string_view content);
bool is_member_key(std::string_view content);
std::string format_member_key(const MemberKey& key);
Result<MemberKey> parse_member_key(std::string_view content);

}  // namespace kvferry::net
