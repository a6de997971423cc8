#include "transport/shm/block_copy.h"

#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "transport/base/memory/large_memory.h"

namespace kvferry::shm {
namespace {

Error cma_failed(int code, int pid) {
  if (code == ESRCH) return Error{ErrorCode::kPeerLost, fmt::format("the peer's process {} has ended", pid)};
  if (code == EPERM || code == ENOSYS)
    return Error{
        ErrorCode::kUnavailable,
        fmt::format("the system does not let this process copy memory of the peer's process {} by CMA, that is "
                    "process_vm_readv() ({}): allow ptrace between the two processes (kernel.yama.ptrace_scope=0, in "
                    "containers the capability SYS_PTRACE), or use another path than cma",
                    pid, std::strerror(code))};
  return Error{ErrorCode::kRefused,
               fmt::format("memory of the peer's process {} can't be copied by CMA (process_vm_readv/writev): {}", pid,
                           std::strerror(code))};
}

}  // namespace

void copy_mapped(std::span<const CopyRange> ranges, std::byte* local_base, std::byte* remote_base, Direction direction,
                 bool bypass_cache) {
  const bool is_pull = direction == Direction::kPull;
  for (std::size_t index = 0; index < ranges.size(); ++index) {
    if (bypass_cache && index + 1 < ranges.size()) {
      const CopyRange& next = ranges[index + 1];
      expect(is_pull ? remote_base + next.remote_offset : local_base + next.local_offset, next.bytes);
    }
    const CopyRange& range = ranges[index];
    std::byte* local = local_base + range.local_offset;
    std::byte* remote = remote_base + range.remote_offset;
    std::byte* const to = is_pull ? local : remote;
    const std::byte* const from = is_pull ? remote : local;
    if (bypass_cache)
      stream_copy(to, from, range.bytes);
    else
      std::memcpy(to, from, range.bytes);
  }
  if (bypass_cache) finish_streams();
}

Result<void> copy_by_cma(std::span<const CopyRange> ranges, std::byte* local_base, std::uint64_t remote_base,
                         Direction direction, int pid) {
  constexpr std::size_t kRangesMax = 512;  // ranges for each system call; more (the kernel allows 1024) are not faster
  std::array<iovec, kRangesMax> local;
  std::array<iovec, kRangesMax> remote;
  std::size_t index = 0;
  std::uint64_t done_bytes = 0;  // copied bytes of ranges[index]
  while (index < ranges.size()) {
    std::size_t count = 0;
    for (std::size_t next = index; next < ranges.size() && count < kRangesMax; ++next) {
      const CopyRange& range = ranges[next];
      const std::uint64_t skip = next == index ? done_bytes : 0;
      if (range.bytes == skip) continue;
      local[count] = {local_base + range.local_offset + skip, range.bytes - skip};
      remote[count] = {reinterpret_cast<void*>(remote_base + range.remote_offset + skip), range.bytes - skip};
      ++count;
    }
    if (count == 0) return {};
    const ssize_t got = direction == Direction::kPull
                            ? ::process_vm_readv(pid, local.data(), count, remote.data(), count, 0)
                            : ::process_vm_writev(pid, local.data(), count, remote.data(), count, 0);
    if (got <= 0) return cma_failed(got < 0 ? errno : EFAULT, pid);
    done_bytes += static_cast<std::uint64_t>(got);
    while (index < ranges.size() && done_bytes >= ranges[index].bytes) done_bytes -= ranges[index++].bytes;
  }
  return {};
}

}  // namespace kvferry::shm
