// Names of the transports of UCX in a context and at an endpoint. Private to this folder.
#pragma once

#include <set>
#include <string>
#include <string_view>

#include "transport/ucx/ucx_library.h"

namespace kvferry::ucx {

/// Returns the names of the transports that UCX has found for this context, such as "rc_mlx5"; empty: unknown.
std::set<std::string> transports_of(ucp_context_h context);
/// Returns the names of the transports with devices that an endpoint uses, such as "tcp/eth0"; empty: unknown.
std::set<std::string> transports_of(ucp_ep_h ep);

/// Returns the names in UCX's description of a context; empty: the description has an unknown form.
std::set<std::string> names_in_context(const std::string& description);
/// Returns whether a transport of this name is RDMA. `name`: a transport, or a group of them such as "rc".
bool is_rdma(std::string_view name);

}  // namespace kvferry::ucx
