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

/// Examines the kvferry processes in `pids`, or all kvferry processes of this host if `pids` is empty. If `controller`
/// is not empty, also examines the controller at this endpoint.
SecurityReport examine_security(const std::vector<int>& pids, const std::string& controller);

}  // namespace kvferry::cli
