#include "transport/ucx/net_devices.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <string_view>

#include "transport/base/net/near_nics.h"
#include "transport/ucx/transport_names.h"

namespace kvferry::ucx {
namespace {

/// Returns whether a value of UCX_TLS allows RDMA. A value that begins with '^' lists transports that UCX leaves out;
/// it allows RDMA unless it lists "ib", which means all RDMA transports. Any other value allows RDMA if it lists "all"
/// or an RDMA transport.
bool allows_rdma(std::string_view transports) {
  if (transports.starts_with('^')) return fmt::format(",{},", transports.substr(1)).find(",ib,") == std::string::npos;
  while (!transports.empty()) {
    const std::string_view word = transports.substr(0, transports.find(','));
    if (word.starts_with("all") || word.starts_with("ib") || is_rdma(word)) return true;
    transports.remove_prefix(std::min(word.size() + 1, transports.size()));
  }
  return false;
}

}  // namespace

Result<NetDevices> choose_net_devices(const UcxOptions& options, const std::filesystem::path& root,
                                      const Environment& get_env) {
  if (const char* const by_user = get_env("UCX_NET_DEVICES"); by_user != nullptr)
    return NetDevices{{}, fmt::format("UCX_NET_DEVICES={}", by_user)};
  if (const std::vector<std::string> unknown = net::unknown_nics(root, options.nics); !unknown.empty())
    return Error{ErrorCode::kInvalidArgument,
                 fmt::format("no network card of this host is called {}; allowed are names that /sys/class/infiniband "
                             "or /sys/class/net shows (setting nics)",
                             fmt::join(unknown, ", "))};
  const NetDevices as_named{options.nics, fmt::format("{}", fmt::join(options.nics, ", "))};
  if (options.gpu_bus_id.empty()) return as_named;
  const char* const transports = get_env("UCX_TLS");
  if (options.nics.empty() && transports != nullptr && !allows_rdma(transports)) return NetDevices{};
  const net::NearNics near = net::nics_near(root, options.gpu_bus_id, options.nics);
  if (near.nics.empty()) return as_named;
  return NetDevices{near.nics, net::describe(near)};
}

}  // namespace kvferry::ucx
