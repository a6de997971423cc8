#include "launch/bench/harness/bench_memory.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <utility>

namespace kvferry::bench {

Result<BenchMemory> BenchMemory::make(MemoryKind kind, std::uint64_t bytes) {
  BenchMemory made;
  if (kind == MemoryKind::kKvferry) {
    Result<SharedMemory> shared = SharedMemory::create("bench", bytes);
    if (!shared) return std::move(shared).error();
    made.shared_.emplace(std::move(*shared));
    made.memory_ = made.shared_->span();
    return made;
  }
  void* data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED)
    return Error{ErrorCode::kUnavailable, fmt::format("cannot map {} bytes: {}", bytes, std::strerror(errno))};
  made.memory_ = {static_cast<std::byte*>(data), bytes};
  ::madvise(data, bytes, MADV_HUGEPAGE);
  std::memset(data, 0, bytes);
  return made;
}

BenchMemory::BenchMemory(BenchMemory&& other) noexcept
    : shared_(std::exchange(other.shared_, std::nullopt)), memory_(std::exchange(other.memory_, {})) {}

BenchMemory::~BenchMemory() {
  if (!shared_ && !memory_.empty()) ::munmap(memory_.data(), memory_.size());
}

MemoryRegion BenchMemory::region() const {
  return shared_ ? shared_->region() : MemoryRegion{memory_.data(), memory_.size()};
}

}  // namespace kvferry::bench
