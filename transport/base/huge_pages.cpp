#include "transport/base/huge_pages.h"

#include <sys/stat.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <string>

namespace kvferry {
namespace {

std::uint64_t pages_said_by(const char* file) {
  std::uint64_t pages = 0;
  return std::ifstream(std::string("/sys/kernel/mm/hugepages/hugepages-2048kB/") + file) >> pages ? pages : 0;
}

}  // namespace

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
