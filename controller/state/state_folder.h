// The state folder on disk: whose it is, what lies in it and by which name.
//
//   kvferry-controller-state      one line that names the format; locked by the controller that uses the folder
//   log-NUMBER, snapshot-NUMBER   frames.h; the newest snapshot and the logs from its number on are the whole state
//   snapshot-NUMBER.tmp           not finished
//   *.damaged                     what a reload could not read, set aside
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "transport/base/owned_fd.h"
#include "transport/base/result.h"

namespace kvferry::controller {

/// Held by one process at a time, from open() to the destructor. Threads: one at a time; paths from any.
class StateFolder {
 public:
  struct Files {
    std::set<std::uint64_t> logs, snapshots;  // their numbers
  };

  /// Makes the folder where there is none, and removes what was not finished.
  /// kRefused: another controller uses it. kInvalidArgument: it is not a controller's, or of another format.
  /// kUnavailable: it can't be made, read or written.
  static Result<StateFolder> open(const std::string& path);

  const std::string& path() const { return path_; }
  std::string log(std::uint64_t number) const;
  std::string snapshot(std::uint64_t number) const;
  std::string unfinished_snapshot(std::uint64_t number) const { return snapshot(number) + ".tmp"; }
  Result<Files> files() const;
  /// Removes all logs and snapshots but those with these paths or higher numbers, and renames those to be set aside.
  static void remove_older(const std::string& folder, const std::string& log, const std::string& snapshot,
                           const std::vector<std::string>& set_aside);

 private:
  StateFolder(std::string path, OwnedFd lock) : path_(std::move(path)), lock_(std::move(lock)) {}

  std::string path_;
  OwnedFd lock_;
};

/// So that names of files in it outlive a loss of power.
void sync_folder(const std::string& path);

}  // namespace kvferry::controller
