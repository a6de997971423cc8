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
