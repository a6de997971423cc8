// Copies of many ranges between this process and another one on the same host. Private to this folder.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "transport/base/result.h"
#include "transport/transport.h"

namespace kvferry::shm {

/// One thread's copy of ranges within mapped memory. `bypass_cache`: for amounts that would only push other data out of
/// the cache; stores then go past it, which is a third to a half faster for them.
void copy_mapped(std::span<const CopyRange> ranges, std::byte* local_base, std::byte* remote_base, Direction direction,
                 bool bypass_cache);

/// The same by CMA (process_vm_readv and its twin), many ranges a system call. Addresses in process `pid`.
/// kPeerLost: it is gone; kRefused: memory that is not mapped there (any more); kUnavailable: the system forbids it.
Result<void> copy_by_cma(std::span<const CopyRange> ranges, std::byte* local_base, std::uint64_t remote_base,
                         Direction direction, int pid);

}  // namespace kvferry::shm
