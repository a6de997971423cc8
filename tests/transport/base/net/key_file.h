// A cluster key file that a test rotates, as `kvferry keygen` does.
#pragma once

#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "transport/base/check.h"
#include "transport/base/net/cluster_key.h"

namespace kvferry::net {

inline const std::string kOldKey(64, 'o'), kNewKey(64, 'n');
/// The contents of a key file before and after each of the three steps.
inline const std::vector<std::vector<std::string>> kRotation = {
    {kOldKey}, {kOldKey, kNewKey}, {kNewKey, kOldKey}, {kNewKey}};

class KeyFile {
 public:
  KeyFile(const std::string& folder, const std::vector<std::string>& keys) {
    static int num_made = 0;
    path_ = folder + fmt::format("key-file-{}-{}", ::getpid(), ++num_made);
    write(keys);
  }
  ~KeyFile() { std::remove(path_.c_str()); }
  KeyFile(const KeyFile&) = delete;
  KeyFile& operator=(const KeyFile&) = delete;
  const std::string& path() const { return path_; }
  std::optional<ClusterKey> read() const { return read_cluster_key(path_).value(); }

  void write(const std::vector<std::string>& keys) { write_content(format_cluster_keys(keys)); }
  void write_content(const std::string& content) {
    const std::string written = path_ + ".new";
    std::ofstream(written) << content;
    ::chmod(written.c_str(), 0600);
    KVFERRY_CHECK(std::rename(written.c_str(), path_.c_str()) == 0, "can't replace {}", path_);
  }

 private:
  std::string path_;
};

/// Waits until `reached` returns true, at most 20 s. Returns whether it did.
inline bool reaches(const std::function<bool()>& reached) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (!reached()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return true;
}

}  // namespace kvferry::net
