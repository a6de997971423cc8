// The memory of a measurement: a shared segment as kvferry allocates it, or private anonymous memory.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "transport/shared_memory.h"

namespace kvferry::bench {

enum class MemoryKind : std::uint8_t { kKvferry, kForeign };
inline const char* name_of(MemoryKind kind) { return kind == MemoryKind::kKvferry ? "kvferry" : "foreign"; }

/// Memory of either kind, with all pages populated; both kinds ask the system for huge pages.
class BenchMemory {
 public:
  /// Throws a Failure kUnavailable if there is not enough memory.
  BenchMemory(MemoryKind kind, std::uint64_t bytes);
  BenchMemory(const BenchMemory&) = delete;
  BenchMemory& operator=(const BenchMemory&) = delete;
  ~BenchMemory();

  std::span<std::byte> span() const { return memory_; }
  /// Returns the argument of Transport::register_region(), with the file descriptor if the memory is shared.
  MemoryRegion region() const;
  const SharedMemory* shared() const { return shared_ ? &*shared_ : nullptr; }

 private:
  std::optional<SharedMemory> shared_;
  std::span<std::byte> memory_;
};

}  // namespace kvferry::bench
