// Functions for large amounts of memory: huge pages, and copies that bypass the caches.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace kvferry {

constexpr std::uint64_t kHugePageBytes = std::uint64_t{2} << 20;

/// Returns how many bytes of a mapping the kernel backs with huge pages now; 0 if /proc/self/smaps can't be read.
std::uint64_t huge_page_bytes(std::span<const std::byte> memory);
/// Rounds the size of a file's mapping up to whole pages of that file, as munmap() requires for huge pages.
std::uint64_t whole_pages(int fd, std::uint64_t bytes);
/// Returns the total size of the huge pages of kHugePageBytes that the system has set aside (vm.nr_hugepages) and that
/// no process uses or has reserved.
std::uint64_t reserved_huge_page_bytes();

/// Maps a shared file at an address at which its huge pages can be mapped whole. `bytes`: see whole_pages(). Returns
/// MAP_FAILED, with errno, like mmap().
void* map_for_huge_pages(int fd, std::uint64_t offset, std::uint64_t bytes, int protection);
/// Allocates huge pages for the parts of a shared mapping that are as large and as aligned as one. The kernel does so
/// by itself only if /sys/kernel/mm/transparent_hugepage/shmem_enabled is `advise` or `always`; from Linux 6.1 on it
/// also does what this function asks for, unless that file says `deny`. Stops early if the kernel makes none, or is
/// much slower than with ordinary pages because it has to move others' pages for them; the rest of the memory is then
/// left as it was.
void make_huge_pages(std::span<std::byte> memory);

/// A memcpy for amounts larger than a cache: its stores bypass the caches, so that memory is not read before it is
/// overwritten, and the next source is prefetched during the copy.
///
/// Copies `bytes` bytes. If the processor has neither AVX2 nor AVX-512, this is an ordinary memcpy, which prefetches
/// nothing. Call finish_streams() before another thread reads `to`. `ahead` is the source of the next copy, which is
/// prefetched during this one; nullptr: nothing is prefetched.
void stream_copy(std::byte* to, const std::byte* from, std::size_t bytes, const std::byte* ahead = nullptr);
/// Makes the stores of this thread's stream_copy() calls visible to other threads.
void finish_streams();

/// Prefetches `bytes` bytes, but at most `lines_max` cache lines. The hardware prefetcher fetches the remaining lines
/// of a block, but stops at the end of a page, so by itself it would not fetch the first lines of the next block.
void expect(const std::byte* from, std::size_t bytes, std::size_t lines_max = 8);

}  // namespace kvferry
