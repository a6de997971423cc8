// Which network cards a transport's UCX uses. Private to this folder.
#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "transport/base/result.h"
#include "transport/make_transport.h"

namespace kvferry::ucx {

/// Returns the value of a variable of the environment, nullptr if it is not set.
using Environment = std::function<const char*(const char*)>;

struct NetDevices {
  std::vector<std::string> names;  // value of UCX's option NET_DEVICES; empty: UCX decides
  std::string why;                 // for logs, such as "mlx5_0:1 (behind one PCIe switch with the GPU)"; may be empty
};

/// Chooses the network cards. UCX decides if the user has set UCX_NET_DEVICES. UCX also decides if `options` names no
/// card and either names no GPU, or UCX_TLS leaves out RDMA, or this host lacks the GPU or a usable RDMA device.
/// kInvalidArgument: `options` names a card that this host does not have. `root`: the folder that contains /sys and
/// /dev.
Result<NetDevices> choose_net_devices(const UcxOptions& options, const std::filesystem::path& root,
                                      const Environment& get_env);

}  // namespace kvferry::ucx
