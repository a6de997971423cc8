// Loads a controller's state at its start: the newest snapshot, and the logs from its number on.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "controller/directory/directory_state.h"
#include "controller/state/state_folder.h"
#include "transport/base/result.h"

namespace kvferry::controller {

struct LoadedState {
  std::uint64_t next_number = 1;  // for the next log
  std::uint64_t num_logs = 0;
  std::uint64_t log_bytes = 0;
  std::uint64_t snapshot_bytes = 0;  // 0: there is no snapshot
  std::uint64_t num_records = 0;
  std::string damage;                  // a sentence; empty: everything was read
  std::vector<std::string> set_aside;  // paths of damaged files, to be renamed
};

/// Fills an empty directory. Truncates a torn end of the last log. If a file is damaged, loads the data before the
/// damage; the nodes publish the rest again. kInvalidArgument: a file has another format. kUnavailable: a file cannot
/// be read.
Result<LoadedState> load_state(const StateFolder& folder, DirectoryState& state);

}  // namespace kvferry::controller
