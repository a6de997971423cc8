#include "transport/shm/block_copy.h"

#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvferry::shm {
namespace {

using Copy = void (*)(std::byte* to, const std::byte* from, std::size_t bytes);

void copy_cached(std::byte* to, const std::byte* from, std::size_t bytes) { std::memcpy(to, from, bytes); }

#if defined(__x86_64__)
constexpr std::size_t kLine = 64;

/// Up to the first whole cache line of `to`; streaming stores want them aligned and whole.
std::size_t unaligned_head(const std::byte* to, std::size_t bytes) {
  const std::size_t past = reinterpret_cast<std::uintptr_t>(to) % kLine;
  return past == 0 ? 0 : std::min(bytes, kLine - past);
}

__attribute__((target("avx512f"))) void stream_avx512(std::byte* to, const std::byte* from, std::size_t bytes) {
  const std::size_t head = unaligned_head(to, bytes);
  std::memcpy(to, from, head);
  std::size_t at = head;
  for (; at + 4 * kLine <= bytes; at += 4 * kLine) {
    const __m512i a = _mm512_loadu_si512(from + at);
    const __m512i b = _mm512_loadu_si512(from + at + kLine);
    const __m512i c = _mm512_loadu_si512(from + at + 2 * kLine);
    const __m512i d = _mm512_loadu_si512(from + at + 3 * kLine);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + at), a);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + at + kLine), b);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + at + 2 * kLine), c);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + at + 3 * kLine), d);
  }
  std::memcpy(to + at, from + at, bytes - at);
}

__attribute__((target("avx2"))) void stream_avx2(std::byte* to, const std::byte* from, std::size_t bytes) {
  const std::size_t head = unaligned_head(to, bytes);
  std::memcpy(to, from, head);
  std::size_t at = head;
  for (; at + 2 * kLine <= bytes; at += 2 * kLine) {
    __m256i part[4];
    for (std::size_t index = 0; index < 4; ++index)
      part[index] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + at + 32 * index));
    for (std::size_t index = 0; index < 4; ++index)
      _mm256_stream_si256(reinterpret_cast<__m256i*>(to + at + 32 * index), part[index]);
  }
  std::memcpy(to + at, from + at, bytes - at);
}

Copy best_streaming_copy() {
  if (__builtin_cpu_supports("avx512f")) return stream_avx512;
  if (__builtin_cpu_supports("avx2")) return stream_avx2;
  return copy_cached;
}

/// A block's first lines on their way while the one before is copied: the hardware fetches ahead within a page only.
void expect(const std::byte* from, std::size_t bytes) {
  for (std::size_t at = 0; at < std::min<std::size_t>(bytes, 8 * kLine); at += kLine) __builtin_prefetch(from + at);
}

void finish_stores() { _mm_sfence(); }
#else
Copy best_streaming_copy() { return copy_cached; }
void expect(const std::byte*, std::size_t) {}
void finish_stores() {}
#endif

Error cma_failed(int code, int pid) {
  if (code == ESRCH) return Error{ErrorCode::kPeerLost, fmt::format("process {} is gone", pid)};
  if (code == EPERM || code == ENOSYS)
    return Error{ErrorCode::kUnavailable,
                 fmt::format("the system forbids CMA with process {} ({}): allow ptrace between the two, or register "
                             "shared memory",
                             pid, std::strerror(code))};
  return Error{ErrorCode::kRefused,
               fmt::format("memory of process {} can't be reached by CMA: {}", pid, std::strerror(code))};
}

}  // namespace

void copy_mapped(std::span<const CopyRange> ranges, std::byte* local_base, std::byte* remote_base, Direction direction,
                 bool bypass_cache) {
  static const Copy kStreaming = best_streaming_copy();
  const Copy copy = bypass_cache ? kStreaming : copy_cached;
  const bool is_pull = direction == Direction::kPull;
  for (std::size_t index = 0; index < ranges.size(); ++index) {
    if (bypass_cache && index + 1 < ranges.size()) {
      const CopyRange& next = ranges[index + 1];
      expect(is_pull ? remote_base + next.remote_offset : local_base + next.local_offset, next.bytes);
    }
    const CopyRange& range = ranges[index];
    std::byte* local = local_base + range.local_offset;
    std::byte* remote = remote_base + range.remote_offset;
    copy(is_pull ? local : remote, is_pull ? remote : local, range.bytes);
  }
  if (bypass_cache) finish_stores();
}

Result<void> copy_by_cma(std::span<const CopyRange> ranges, std::byte* local_base, std::uint64_t remote_base,
                         Direction direction, int pid) {
  constexpr std::size_t kRangesMax = 512;  // a call; the kernel takes 1024, and gains nothing from more than this
  std::array<iovec, kRangesMax> local;
  std::array<iovec, kRangesMax> remote;
  std::size_t index = 0;
  std::uint64_t done_bytes = 0;  // of ranges[index]
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
