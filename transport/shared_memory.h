// Shared memory without a file: the chunk pool's memory, which its creator owns and processes on the same host may map.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "transport/base/owned_fd.h"
#include "transport/base/result.h"
#include "transport/transport.h"

namespace kvferry {

/// One mapping. The kernel frees the memory when its last mapping and descriptor are gone, in whatever way the
/// processes died. It can't shrink, so no access through a mapping ever fails.
/// Threads: any; the object itself is not synchronised.
class SharedMemory {
 public:
  /// Zeroed memory with all its pages reserved; huge ones where enough are set aside (vm.nr_hugepages) or the system
  /// makes them (/sys/kernel/mm/transparent_hugepage/shmem_enabled is `advise` or more). label: 1 to 64 of
  /// [A-Za-z0-9_.], seen in /proc/PID/maps.
  /// Errors: kInvalidArgument: bad label or bytes == 0; kUnavailable: not enough memory, names `pool_bytes`.
  static Result<SharedMemory> create(std::string_view label, std::uint64_t bytes);
  /// Maps what create() made in a process of the same user that still has it, in whole pages where they are huge.
  /// kNotFound: no such memory.
  static Result<SharedMemory> open(const std::string& name);

  SharedMemory(SharedMemory&& other) noexcept;
  SharedMemory& operator=(SharedMemory&& other) noexcept;
  ~SharedMemory();

  /// "/proc/PID/fd/N" of this process.
  std::string name() const;
  std::byte* data() const { return data_; }
  std::uint64_t bytes() const { return bytes_; }
  std::span<std::byte> span() const { return {data_, bytes_}; }
  /// To register all of it, so that peers on this host map it as well.
  MemoryRegion region() const { return {data_, bytes_, fd_.get(), 0}; }

 private:
  SharedMemory() = default;
  static Result<SharedMemory> create_of(const std::string& name, std::uint64_t bytes, unsigned page_flags);
  Result<void> map(std::uint64_t bytes);

  OwnedFd fd_;
  std::byte* data_ = nullptr;
  std::uint64_t bytes_ = 0;
  std::uint64_t mapped_bytes_ = 0;  // whole pages
};

}  // namespace kvferry
