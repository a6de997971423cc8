// Checks of what CUDA needs on a host with GPUs.
#pragma once

#include <string>
#include <vector>

#include "launch/cli/doctor/finding.h"
#include "launch/cli/doctor/host_checks.h"

namespace kvferry::cli {

/// Returns for each of NVIDIA's GPUs of the host a line with the network cards that its rank uses.
std::vector<std::string> nics_of_gpus(const Host& host);

/// Checks that CUDA's driver library is there, and that CUDA IPC reaches the servers of other containers of this host.
/// Returns no findings for a host without NVIDIA's driver. The findings lack the check's name.
std::vector<Finding> check_cuda_ipc(const Host& host);

}  // namespace kvferry::cli
