// What a controller reads at its start: the newest snapshot, and the logs from its number on.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "controller/directory/directory_state.h"
#include "controller/state/state_folder.h"
#include "transport/base/result.h"

namespace kvferry::controller {

struct LoadedState {
  std::uint64_t next_number = 1;  // of the next log
  std::uint64_t num_logs = 0;
  std::uint64_t log_bytes = 0;
  std::uint64_t snapshot_bytes = 0;  // 0: there was none
  std::uint64_t num_records = 0;
  std::string damage;                  // in a sentence; empty: everything was read
  std::vector<std::string> set_aside;  // paths of what could not all be read, to be kept under another name
};

/// Into a directory that is empty. A torn end of the last log is cut off. Where a file is damaged further in, what
/// comes before it counts: the nodes make good the rest. kInvalidArgument: a file of another format. kUnavailable: one
/// that can't be read.
Result<LoadedState> load_state(const StateFolder& folder, DirectoryState& state);

}  // namespace kvferry::controller
