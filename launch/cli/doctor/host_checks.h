// Checks of the host on which a node will start or runs.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "launch/cli/doctor/finding.h"
#include "transport/base/settings.h"

namespace kvferry::cli {

struct Host {
  std::filesystem::path root = "/";  // folder that contains the host's proc, sys, dev and etc
  GetEnv get_env = ::getenv;
  std::uint64_t pool_bytes = 0;  // size of the pool that a rank allocates
};

/// Returns the number of bytes of memory that a process of this host or container can still allocate.
std::uint64_t free_memory(const Host& host);

/// Returns whether an InfiniBand or RoCE port of the host is active.
bool has_active_rdma(const Host& host);
std::vector<std::string> host_check_names();
std::vector<Finding> examine_host(const Host& host);

}  // namespace kvferry::cli
