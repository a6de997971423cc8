#include "transport/base/memory/large_memory.h"

#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "transport/base/clock.h"

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25  // Linux 6.1 has it; older C libraries lack the name
#endif

namespace kvferry {
namespace {

std::uint64_t pages_said_by(const char* file) {
  std::uint64_t pages = 0;
  return std::ifstream(std::string("/sys/kernel/mm/hugepages/hugepages-2048kB/") + file) >> pages ? pages : 0;
}

constexpr std::size_t kLine = 64;
using Copy = void (*)(std::byte* to, const std::byte* from, std::size_t bytes, const std::byte* ahead);

void copy_cached(std::byte* to, const std::byte* from, std::size_t bytes, const std::byte*) {
  std::memcpy(to, from, bytes);
}

#if defined(__x86_64__)
/// Prefetches into the second-level cache, which allows more outstanding fetches than the first-level cache.
template <std::size_t kLines>
inline void fetch_lines(const std::byte* from) {
  for (std::size_t line = 0; line < kLines; ++line)
    _mm_prefetch(reinterpret_cast<const char*>(from) + line * kLine, _MM_HINT_T1);
}

/// Returns how many bytes precede the first whole cache line of `to`: streaming stores need aligned whole lines.
std::size_t unaligned_head(const std::byte* to, std::size_t bytes) {
  const std::size_t past = reinterpret_cast<std::uintptr_t>(to) % kLine;
  return past == 0 ? 0 : std::min(bytes, kLine - past);
}

__attribute__((target("avx512f"))) void stream_avx512(std::byte* to, const std::byte* from, std::size_t bytes,
                                                      const std::byte* ahead) {
  const std::size_t head = unaligned_head(to, bytes);
  std::memcpy(to, from, head);
  std::size_t at = head;
  for (; at + 4 * kLine <= bytes; at += 4 * kLine) {
    if (ahead != nullptr) fetch_lines<4>(ahead + at);
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

__attribute__((target("avx2"))) void stream_avx2(std::byte* to, const std::byte* from, std::size_t bytes,
                                                 const std::byte* ahead) {
  const std::size_t head = unaligned_head(to, bytes);
  std::memcpy(to, from, head);
  std::size_t at = head;
  for (; at + 2 * kLine <= bytes; at += 2 * kLine) {
    if (ahead != nullptr) fetch_lines<2>(ahead + at);
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

#else
Copy best_streaming_copy() { return copy_cached; }
#endif

const Copy kStreamingCopy = best_streaming_copy();

}  // namespace

void stream_copy(std::byte* to, const std::byte* from, std::size_t bytes, const std::byte* ahead) {
  kStreamingCopy(to, from, bytes, ahead);
}

void finish_streams() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

void expect(const std::byte* from, std::size_t bytes, std::size_t lines_max) {
  for (std::size_t at = 0; at < std::min(bytes, lines_max * kLine); at += kLine) __builtin_prefetch(from + at);
}

std::uint64_t huge_page_bytes(std::span<const std::byte> memory) {
  constexpr const char* kKinds[] = {"AnonHugePages: %lu kB", "ShmemPmdMapped: %lu kB", "Shared_Hugetlb: %lu kB",
                                    "Private_Hugetlb: %lu kB"};
  const auto begin = reinterpret_cast<std::uintptr_t>(memory.data());
  std::ifstream smaps("/proc/self/smaps");
  std::uint64_t huge_bytes = 0;
  bool is_ours = false;
  for (std::string line; std::getline(smaps, line);) {
    unsigned long first = 0;
    unsigned long last = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx ", &first, &last) == 2) {
      is_ours = first < begin + memory.size() && last > begin;
      continue;
    }
    for (const char* kind : kKinds) {
      unsigned long kib = 0;
      if (is_ours && std::sscanf(line.c_str(), kind, &kib) == 1) huge_bytes += std::uint64_t{kib} << 10;
    }
  }
  return std::min<std::uint64_t>(huge_bytes, memory.size());
}

void* map_for_huge_pages(int fd, std::uint64_t offset, std::uint64_t bytes, int protection) {
  const auto map = [&](void* at, int flags) {
    return ::mmap(at, bytes, protection, MAP_SHARED | flags, fd, static_cast<off_t>(offset));
  };
  if (bytes < kHugePageBytes) return map(nullptr, 0);
  const std::uint64_t reserved_bytes = bytes + kHugePageBytes;
  void* const reserved = ::mmap(nullptr, reserved_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) return map(nullptr, 0);
  const auto address = reinterpret_cast<std::uintptr_t>(reserved);
  const std::uint64_t skipped = (offset - address) % kHugePageBytes;
  void* const at = static_cast<std::byte*>(reserved) + skipped;
  void* const mapped = map(at, MAP_FIXED);
  const int error = errno;
  if (mapped == MAP_FAILED) {
    ::munmap(reserved, reserved_bytes);
  } else {
    if (skipped > 0) ::munmap(reserved, skipped);
    ::munmap(static_cast<std::byte*>(at) + bytes, reserved_bytes - skipped - bytes);
  }
  errno = error;
  return mapped;
}

void make_huge_pages(std::span<std::byte> memory) {
  // Ordinary pages take about a second for each GiB, so that the memory is there after twice that and two seconds.
  constexpr std::uint64_t kGib = std::uint64_t{1} << 30;
  const SteadyClock clock;
  const TimeNs deadline = clock.now() + 2 * kSecond + kSecond * static_cast<TimeNs>(memory.size() / kGib);
  const std::uint64_t past = reinterpret_cast<std::uintptr_t>(memory.data()) % kHugePageBytes;
  for (std::uint64_t at = past == 0 ? 0 : kHugePageBytes - past; at + kHugePageBytes <= memory.size();
       at += kHugePageBytes) {
    std::byte* const page = memory.data() + at;
    // The kernel makes a huge page only where the file has a page already.
    if (::madvise(page, 1, MADV_POPULATE_WRITE) != 0) return;
    if (::madvise(page, kHugePageBytes, MADV_COLLAPSE) != 0 && errno == EINVAL) return;
    if (clock.now() > deadline) return;
  }
}

std::uint64_t whole_pages(int fd, std::uint64_t bytes) {
  struct stat stats {};
  const std::uint64_t page_bytes = ::fstat(fd, &stats) == 0 && stats.st_blksize > 0
                                       ? static_cast<std::uint64_t>(stats.st_blksize)
                                       : std::uint64_t{4096};
  return (bytes + page_bytes - 1) / page_bytes * page_bytes;
}

std::uint64_t reserved_huge_page_bytes() {
  const std::uint64_t free = pages_said_by("free_hugepages");
  const std::uint64_t promised = pages_said_by("resv_hugepages");
  return free > promised ? (free - promised) * kHugePageBytes : 0;
}

}  // namespace kvferry
