// Checks of what CUDA needs on a host with GPUs.
#pragma once

#include <vector>

#include "launch/cli/doctor/finding.h"
#include "launch/cli/doctor/host_checks.h"

namespace kvferry::cli {

/// Checks that CUDA's driver library is there, and that CUDA IPC reaches the servers of other containers of this host.
/// Returns no findings for a host without NVIDIA's driver. The findings lack the check's name.
std::vector<Finding> check_cuda_ipc(const Host& host);

}  // namespace kvferry::cli
