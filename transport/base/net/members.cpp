#include "transport/base/net/members.h"

#include <algorithm>
#include <cctype>
#include <initializer_list>
#include <set>
#include <utility>

namespace kvferry::net {
namespace {

constexpr std::string_view kMembersHead = "kvferry members 1", kMemberKeyHead = "kvferry member key 1\n";
constexpr std::size_t kMemberNameMax = 63, kMembersMax = 65536;

Error damaged(std::string why) { return Error{ErrorCode::kInvalidArgument, std::move(why)}; }

std::vector<std::string_view> split(std::string_view text, char at) {
  std::vector<std::string_view> parts;
  for (;;) {
    const std::size_t end = text.find(at);
    parts.push_back(text.substr(0, end));
    if (end == std::string_view::npos) return parts;
    text.remove_prefix(end + 1);
  }
}

/// Returns the words of each line. A final line break does not begin another line.
std::vector<std::vector<std::string_view>> lines_of(std::string_view content) {
  if (content.ends_with('\n')) content.remove_suffix(1);
  std::vector<std::vector<std::string_view>> lines;
  for (const std::string_view line : split(content, '\n')) lines.push_back(split(line, ' '));
  return lines;
}

std::optional<Role> role_of(std::string_view name) {
  const auto found = std::find(kRoleNames.begin() + 1, kRoleNames.end(), name);
  if (found == kRoleNames.end()) return std::nullopt;
  return static_cast<Role>(found - kRoleNames.begin());
}

/// Reads the words after the first `skipped`, which are keys in hexadecimal, into `to`. Returns false if their number
/// or one of them is wrong.
bool read_keys(const std::vector<std::string_view>& words, std::size_t skipped, std::initializer_list<Bytes32*> to) {
  if (words.size() != skipped + to.size()) return false;
  for (Bytes32* const key : to) {
    const std::optional<Bytes32> bytes = bytes32_of_hex(words[skipped++]);
    if (!bytes) return false;
    *key = *bytes;
  }
  return true;
}

bool read_identity(std::string_view name, std::string_view role, Identity& to) {
  const std::optional<Role> known = role_of(role);
  if (!known || !is_member_name(name)) return false;
  to = {std::string(name), *known};
  return true;
}

std::string hex_text(const Bytes32& bytes) { return hex_of(text_of(bytes)); }

}  // namespace

std::string Identity::str() const {
  if (name.empty()) return "the holder of the cluster key";
  return fmt::format("member '{}' (role {})", name, name_of(role));
}

bool Identity::owns(std::string_view engine_id) const {
  if (name.empty() || engine_id == name) return true;
  return engine_id.starts_with(name) && (engine_id[name.size()] == '_' || engine_id[name.size()] == '.');
}

Bytes32 curve_secret(std::string_view cluster_key) { return derive(cluster_key, "kvferry CURVE 1"); }
Bytes32 certificate_secret(std::string_view cluster_key) { return derive(cluster_key, "kvferry certificate 1"); }
Bytes32 node_secret(std::string_view cluster_key) { return derive(cluster_key, "kvferry nodes 1"); }
Bytes32 router_secret(const Bytes32& node_secret) { return derive(text_of(node_secret), "kvferry routers 1"); }

Bytes32 MemberKey::curve_secret() const { return net::curve_secret(text_of(secret)); }
Bytes32 MemberKey::certificate_secret() const { return net::certificate_secret(text_of(secret)); }
std::string MemberKey::http_token() const { return hex_text(derive(text_of(secret), "kvferry HTTP member 1")); }

Member public_of(const MemberKey& key) {
  return {key.identity, curve_public(key.curve_secret()), certificate_public(key.certificate_secret()),
          sha256(key.http_token())};
}

std::vector<MemberKey::Shared> shared_with(Role role, const std::vector<std::string>& cluster_keys) {
  std::vector<MemberKey::Shared> shared;
  for (const std::string& key : cluster_keys) {
    const Bytes32 secret = node_secret(key);
    shared.push_back({curve_public(curve_secret(key)), certificate_public(certificate_secret(key)),
                      role >= Role::kWorker ? secret : router_secret(secret)});
  }
  return shared;
}

bool is_member_name(std::string_view name) {
  return !name.empty() && name.size() <= kMemberNameMax && std::all_of(name.begin(), name.end(), [](char letter) {
    return std::isalnum(static_cast<unsigned char>(letter)) != 0 || letter == '-';
  });
}

std::string members_file_of(const std::string& key_file) {
  return key_file.substr(0, key_file.rfind('/') + 1) + "kvferry.members";
}

std::string format_members(const std::vector<Member>& members) {
  std::string content = fmt::format("{}\n", kMembersHead);
  for (const Member& member : members)
    content += fmt::format("{} {} {} {} {}\n", member.identity.name, name_of(member.identity.role),
                           hex_text(member.curve), hex_text(member.certificate), hex_text(member.token_hash));
  return content;
}

Result<std::vector<Member>> parse_members(std::string_view content) {
  const auto lines = lines_of(content);
  if (!content.ends_with('\n') || !content.starts_with(fmt::format("{}\n", kMembersHead)))
    return damaged(
        fmt::format("the list is damaged or not complete; it must begin with the line '{}' and end with a line break",
                    kMembersHead));
  if (lines.size() - 1 > kMembersMax)
    return damaged(fmt::format("the list has {} members; at most {} are allowed", lines.size() - 1, kMembersMax));
  std::vector<Member> members;
  std::set<std::string> names;
  for (std::size_t i = 1; i < lines.size(); ++i) {
    Member member;
    if (lines[i].size() < 2 || !read_identity(lines[i][0], lines[i][1], member.identity) ||
        !read_keys(lines[i], 2, {&member.curve, &member.certificate, &member.token_hash}))
      return damaged(
          fmt::format("line {} is no member; allowed: a name of 1 to 63 letters, digits and dashes, a role (reader, "
                      "worker, admin) and three keys of 64 hexadecimal digits (0-9, a-f)",
                      i + 1));
    if (!names.insert(member.identity.name).second)
      return damaged(
          fmt::format("the list has two members with the name '{}'; each name may occur once", member.identity.name));
    members.push_back(std::move(member));
  }
  return members;
}

bool is_member_key(std::string_view content) { return content.starts_with(kMemberKeyHead); }

std::string format_member_key(const MemberKey& key) {
  std::string content =
      fmt::format("{}{} {} {}\n", kMemberKeyHead, key.identity.name, name_of(key.identity.role), hex_text(key.secret));
  for (const MemberKey::Shared& one : key.shared)
    content += fmt::format("{} {} {}\n", hex_text(one.controller), hex_text(one.certificate), hex_text(one.secret));
  return content;
}

Result<MemberKey> parse_member_key(std::string_view content) {
  constexpr std::size_t kLinesMin = 3, kLinesMax = 4;
  const auto lines = lines_of(content);
  MemberKey key;
  bool is_right = content.ends_with('\n') && lines.size() >= kLinesMin && lines.size() <= kLinesMax &&
                  lines[1].size() == 3 && read_identity(lines[1][0], lines[1][1], key.identity) &&
                  read_keys(lines[1], 2, {&key.secret});
  for (std::size_t i = 2; is_right && i < lines.size(); ++i) {
    MemberKey::Shared& one = key.shared.emplace_back();
    is_right = read_keys(lines[i], 0, {&one.controller, &one.certificate, &one.secret});
  }
  if (!is_right)
    return damaged("the file is a damaged key of a member; make a new key with 'kvferry keygen --add-node'");
  return key;
}

}  // namespace kvferry::net
