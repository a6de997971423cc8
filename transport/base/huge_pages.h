// Counts huge pages of mappings and of the host.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace kvferry {

constexpr std::uint64_t kHugePageBytes = std::uint64_t{2} << 20;

/// Returns how many bytes of a mapping the kernel backs with huge pages now; 0 if /proc/self/smaps can't be read.
std::uint64_t huge_page_bytes(std::span<const std::byte> memory);
/// Rounds the size of a file's mapping up to whole pages of that file, as munmap() requires.
std::uint64_t whole_pages(int fd, std::uint64_t bytes);
/// Returns the number of reserved huge pages of kHugePageBytes (vm.nr_hugepages) that no process uses.
std::uint64_t reserved_huge_page_bytes();

}  // namespace kvferry
