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

/// Examines the kvferry processes in `pids` or, if `pids` is empty, all kvferry processes of this host; without root's
/// rights, only those of this user. Also examines the controller at the endpoint `controller`, unless this is empty or
/// no other host can reach it.
SecurityReport examine_security(const std::vector<int>& pids, const std::string& controller);

}  // namespace kvferry::cli
