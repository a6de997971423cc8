// A folder with a cluster key, a list of members and their keys, as `kvferry keygen` makes it.
#pragma once

#include <sys/stat.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "transport/base/check.h"
#include "transport/base/net/cluster_key.h"

namespace kvferry::net {

class MembersFolder {
 public:
  explicit MembersFolder(std::string cluster_key = std::string(64, 'c')) : cluster_keys_{std::move(cluster_key)} {
    std::string path = std::filesystem::temp_directory_path() / "kvferry-members-XXXXXX";
    KVFERRY_CHECK(::mkdtemp(path.data()) != nullptr, "can't make {}", path);
    folder_ = path + "/";
    write("cluster.key", cluster_keys_[0]);
    write_list();
  }
  ~MembersFolder() { std::filesystem::remove_all(folder_); }
  MembersFolder(const MembersFolder&) = delete;
  MembersFolder& operator=(const MembersFolder&) = delete;

  /// Makes a member and returns its key, which follows the list.
  ClusterKey add(const std::string& name, Role role) {
    MemberKey key{{name, role}, {}, shared_with(role, cluster_keys_)};
    for (std::size_t i = 0; i < key.secret.size(); ++i)
      key.secret[i] = static_cast<std::uint8_t>(name[i % name.size()] + i);
    members_.push_back(public_of(key));
    write_list();
    write(name + ".key", format_member_key(key));
    return read(name);
  }
  void revoke(const std::string& name) {
    std::erase_if(members_, [&](const Member& member) { return member.identity.name == name; });
    write_list();
  }
  /// Returns the key in a file of the folder: "cluster", or a member's name.
  ClusterKey read(const std::string& name) const { return *read_cluster_key(folder_ + name + ".key").value(); }
  const std::string& path() const { return folder_; }

  void write(const std::string& name, const std::string& content, unsigned mode = 0600) const {
    const std::string file = folder_ + name, written = file + ".new";
    std::ofstream(written) << content;
    ::chmod(written.c_str(), mode);
    KVFERRY_CHECK(std::rename(written.c_str(), file.c_str()) == 0, "can't replace {}", file);
  }

 private:
  void write_list() const { write("kvferry.members", format_members(members_)); }

  const std::vector<std::string> cluster_keys_;
  std::string folder_;
  std::vector<Member> members_;
};

}  // namespace kvferry::net
