// Copies of many ranges between this process and another one on the same host. Private to this folder.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "transport/base/result.h"
#include "transport/transport.h"

namespace kvferry::shm {

/// Copies ranges within mapped memory, on this thread. `bypass_cache`: stores bypass the cache, which is faster for
/// amounts of memory that exceed the cache.
void copy_mapped(std::span<const CopyRange> ranges, std::byte* local_base, std::byte* remote_base, Direction direction,
                 bool bypass_cache);

/// Copies by CMA (process_vm_readv() and process_vm_writev()), many ranges for each system call. `remote_base` is an
/// address in process `pid`. kPeerLost: the process is gone; kUnavailable: the system forbids such copies; kRefused:
/// any other failure, for example because the memory is not mapped there.
Result<void> copy_by_cma(std::span<const CopyRange> ranges, std::byte* local_base, std::uint64_t remote_base,
                         Direction direction, int pid);

}  // namespace kvferry::shm
