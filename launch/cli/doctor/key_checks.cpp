#include "launch/cli/doctor/key_checks.h"

#include <algorithm>

#include "transport/base/net/cluster_key.h"

namespace kvferry::cli {
namespace {

std::vector<Finding> check_member(const std::string& file, const net::ClusterKey& key) {
  const auto content = key.content();
  if (!content->own || !content->members) return {};
  const net::Member own = net::public_of(*content->own);
  if (std::ranges::find(*content->members, own) == content->members->end())
    return {{.what = fmt::format(
                 "{} is the key of {}, who is not in the list {}: the member was revoked, or the list is out of date",
                 file, own.identity.str(), net::members_file_of(file)),
             .advice = "copy the current list to this host, or make another key with kvferry keygen --add-node"}};
  return {{.what = fmt::format("{} is the key of {}", file, own.identity.str()),
           .advice = "do nothing; to end this member's access, use kvferry keygen --revoke",
           .is_hint = true}};
}

}  // namespace

std::vector<Finding> check_key(const std::string& file) {
  if (file.empty()) return {};
  const auto key = net::read_cluster_key(file);
  if (key && *key) return check_member(file, **key);
  if (key) return {};
  return {{.what = key.error().what,
           .advice = "correct the file (chmod 600 if its mode is wrong), or make one with kvferry keygen"}};
}

}  // namespace kvferry::cli
