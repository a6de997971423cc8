#include "launch/bench/harness/bench_memory.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>

#include "launch/bench/harness/failure.h"

namespace kvferry::bench {

BenchMemory::BenchMemory(MemoryKind kind, std::uint64_t bytes) {
  if (kind == MemoryKind::kKvferry) {
    shared_.emplace(need(SharedMemory::create("bench", bytes)));
    memory_ = shared_->span();
    return;
  }
  void* data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED)
    throw Failure({ErrorCode::kUnavailable, fmt::format("can't allocate the {} bytes of memory of the measurement: {}",
                                                        bytes, std::strerror(errno))});
  memory_ = {static_cast<std::byte*>(data), bytes};
  ::madvise(data, bytes, MADV_HUGEPAGE);
  std::memset(data, 0, bytes);
}

BenchMemory::~BenchMemory() {
  if (!shared_) ::munmap(memory_.data(), memory_.size());
}

MemoryRegion BenchMemory::region() const {
  return shared_ ? shared_->region() : MemoryRegion{memory_.data(), memory_.size()};
}

}  // namespace kvferry::bench
