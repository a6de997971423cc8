#include "controller/index/page_memory.h"

#include <sys/mman.h>

#include <cstdint>
#include <new>

#include "transport/base/memory/large_memory.h"

namespace kvferry::controller {
namespace {

constexpr std::size_t kPageBytes = std::size_t{4} << 10;

std::size_t round_up(std::size_t bytes, std::size_t unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace

PageMemory::PageMemory(std::size_t size_bytes, Pages pages) {
  const bool huge = pages == Pages::kHuge && size_bytes >= kHugePageBytes;
  size_bytes_ = round_up(size_bytes, kPageBytes);
  // One more huge page is mapped, so that the memory can begin at a huge page's boundary.
  const std::size_t mapped_bytes = size_bytes_ + (huge ? kHugePageBytes : 0);
  void* mapped =
      ::mmap(nullptr, mapped_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) throw std::bad_alloc();
  char* begin = static_cast<char*>(mapped);
  data_ = begin;
  if (!huge) return;
  const std::size_t before =
      round_up(reinterpret_cast<std::uintptr_t>(begin), kHugePageBytes) - reinterpret_cast<std::uintptr_t>(begin);
  data_ = begin + before;
  if (before > 0) ::munmap(begin, before);
  if (before < kHugePageBytes) ::munmap(data_ + size_bytes_, kHugePageBytes - before);
  ::madvise(data_, size_bytes_, MADV_HUGEPAGE);  // only a hint to the kernel; small pages work too
}

PageMemory::~PageMemory() {
  if (data_ != nullptr) ::munmap(data_, size_bytes_);
}

void PageMemory::release_before(std::size_t end_bytes) {
  const std::size_t end = end_bytes / kHugePageBytes * kHugePageBytes;
  if (end <= released_bytes_) return;
  ::madvise(data_ + released_bytes_, end - released_bytes_, MADV_DONTNEED);
  released_bytes_ = end;
}

void PageMemory::swap(PageMemory& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_bytes_, other.size_bytes_);
  std::swap(released_bytes_, other.released_bytes_);
}

}  // namespace kvferry::controller
