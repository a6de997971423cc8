// The memory of a measurement: the kind kvferry allocates (a shared segment), or somebody else's (private, anonymous).
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "transport/base/result.h"
#include "transport/shared_memory.h"

namespace kvferry::bench {

enum class MemoryKind : std::uint8_t { kKvferry, kForeign };

/// All pages are there from the start, huge ones where the system gives them (both kinds ask).
class BenchMemory {
 public:
  /// kUnavailable: not enough memory.
  static Result<BenchMemory> make(MemoryKind kind, std::uint64_t bytes);
  BenchMemory(BenchMemory&& other) noexcept;
  BenchMemory& operator=(BenchMemory&&) = delete;
  ~BenchMemory();

  std::span<std::byte> span() const { return memory_; }
  /// For Transport::register_region(): with the descriptor where it is kvferry's.
  MemoryRegion region() const;
  const SharedMemory* shared() const { return shared_ ? &*shared_ : nullptr; }

 private:
  BenchMemory() = default;

  std::optional<SharedMemory> shared_;
  std::span<std::byte> memory_;
};

}  // namespace kvferry::bench
