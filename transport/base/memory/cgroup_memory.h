// How much memory the cgroups of this process, for example its container's, still allow.
#pragma once

#include <cstdint>
#include <string>

namespace kvferry {

/// Returns the number of bytes that may still be allocated: the least that the process's cgroup and its ancestors
/// allow, in cgroups of version 2 and 1. Page cache does not count as used, because the kernel drops it when memory is
/// needed. UINT64_MAX: no limit. `own_cgroups` and `mount` are for tests.
std::uint64_t bytes_left_in_cgroups(const std::string& own_cgroups = "/proc/self/cgroup",
                                    const std::string& mount = "/sys/fs/cgroup");

}  // namespace kvferry
