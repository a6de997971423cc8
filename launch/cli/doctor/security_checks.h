// Checks of the sockets and key files of this host's kvferry processes.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "transport/base/result.h"

namespace kvferry::cli {

struct SecurityReport {
  std::size_t num_processes = 0;
  std::vector<std::string> weaknesses;  // one sentence for each weakness
};

/// Examines the kvferry processes in `pids`, or all of this host if `pids` is empty. Examines also the controller at
/// the endpoint `controller`, if it is not empty.
SecurityReport examine_security(const std::vector<int>& pids, const std::string& controller);

}  // namespace kvferry::cli
