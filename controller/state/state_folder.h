// The state folder on disk: its lock and the names of its files.
//
//   kvferry-controller-state      one line that names the format; locked by the controller that uses the folder
//   log-NUMBER, snapshot-NUMBER   see batches.h; the newest snapshot and logs with its number or higher are the state
//   snapshot-NUMBER.tmp           an unfinished snapshot
//   *.damaged                     a file that could not be loaded
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "transport/base/owned_fd.h"
#include "transport/base/result.h"

namespace kvferry::controller {

class DirectoryState;

/// Locks the folder for one process, from open() to the destructor. Threads: one at a time; const functions may be
/// called by any thread.
class StateFolder {
 public:
  struct Files {
    std::set<std::uint64_t> logs, snapshots;  // numbers in the names of the files
  };

  /// Creates the folder if it does not exist, and removes unfinished snapshots.
  /// kRefused: another controller uses the folder. kInvalidArgument: the folder has other contents, or state in another
  /// format. kUnavailable: the folder cannot be created, read or written.
  static Result<StateFolder> open(const std::string& path);

  const std::string& path() const { return path_; }
  std::string log(std::uint64_t number) const;
  std::string snapshot(std::uint64_t number) const;
  std::string unfinished_snapshot(std::uint64_t number) const { return snapshot(number) + ".tmp"; }
  Result<Files> files() const;
  /// Removes the logs and snapshots whose numbers are lower than `number`.
  void remove_below(std::uint64_t number) const;

 private:
  StateFolder(std::string path, OwnedFd lock) : path_(std::move(path)), lock_(std::move(lock)) {}

  std::string path_;
  OwnedFd lock_;
};

struct LoadedState {
  std::uint64_t next_number = 1;  // number of the next log
  std::uint64_t num_logs = 0;
  std::uint64_t log_bytes = 0;
  std::uint64_t snapshot_bytes = 0;  // size of the snapshot; 0: there is no snapshot
  std::uint64_t num_records = 0;
  std::string damage;                  // first file that could not be read, and why; empty: everything was read
  std::vector<std::string> set_aside;  // paths of files that are damaged, missing or unusable, to be renamed
};

/// Loads the state into an empty directory. Removes files that the state does not need, and a torn batch at the end of
/// the last loaded log. If a file is damaged, loads the data before the damage; the nodes publish the rest again.
/// kInvalidArgument: a file has another format. kUnavailable: a file cannot be read, or a torn batch cannot be removed.
Result<LoadedState> load_state(const StateFolder& folder, DirectoryState& state);

/// Syncs a folder, so that its file names survive a loss of power.
void sync_folder(const std::string& path);

}  // namespace kvferry::controller
