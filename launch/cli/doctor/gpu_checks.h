// Checks of what CUDA needs on a host with GPUs.
#pragma once

#include <string>
#include <vector>

#include "launch/cli/doctor/finding.h"
#include "launch/cli/doctor/host_checks.h"

namespace kvferry::cli {

/// Returns a line for each NVIDIA GPU of the host, with the network cards that the rank on this GPU uses unless
/// UCX_NET_DEVICES names others.
std::vector<std::string> nics_of_gpus(const Host& host);

/// Checks that CUDA's driver library is there, and that CUDA IPC reaches the servers of other containers of this host.
/// Returns no findings for a host without NVIDIA's driver. The caller sets Finding::check.
std::vector<Finding> check_cuda_ipc(const Host& host);

}  // namespace kvferry::cli
