// Lets UCX use TCP, for tests of UCX on hosts without RDMA.
#pragma once

#include <cstdlib>

namespace kvferry {

/// Sets UCX_TLS in this process, unless it is set: without it kvferry lets UCX use RDMA only. Programs that this
/// process starts inherit it. With it, transports with path `auto` use UCX too.
inline void let_ucx_use_tcp() { ::setenv("UCX_TLS", "all", 0); }

}  // namespace kvferry
