// Huge pages: who has how many of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace kvferry {

constexpr std::uint64_t kHugePageBytes = std::uint64_t{2} << 20;

/// How much of a mapping the kernel backs with huge pages now, from /proc/self/smaps; 0 where it can't be read.
std::uint64_t huge_page_bytes(std::span<const std::byte> memory);
/// `bytes` of a file's mapping in whole pages of that file, as munmap() wants them.
std::uint64_t whole_pages(int fd, std::uint64_t bytes);
/// In pages of kHugePageBytes that an administrator has set aside (vm.nr_hugepages) and nobody has taken.
std::uint64_t reserved_huge_page_bytes();

}  // namespace kvferry
