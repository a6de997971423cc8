// The chunk pool's memory: shared, without a name in the file system; processes of the same host may map it.
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

/// One mapping. The kernel frees the memory with its last mapping and descriptor, also if processes die. It can't
/// shrink, so no access through a mapping fails. Threads: any; the object itself is not synchronised.
class SharedMemory {
 public:
  /// Zeroed memory with all pages reserved: huge pages if enough are set aside (vm.nr_hugepages) or the system makes
  /// them
  /// (/sys/kernel/mm/transparent_hugepage/shmem_enabled is `advise` or more). `label`: 1 to 64 of [A-Za-z0-9_.], shown
  /// in /proc/PID/maps. kInvalidArgument: bad label or no bytes; kUnavailable: not enough memory, names `pool_bytes`.
  static Result<SharedMemory> create(std::string_view label, std::uint64_t bytes);
  /// Maps memory that another process of the same user has created, by its name(). kNotFound: no such memory.
  static Result<SharedMemory> open(const std::string& name);

  SharedMemory(SharedMemory&& other) noexcept;
  SharedMemory& operator=(SharedMemory&& other) noexcept;
  ~SharedMemory();

  /// "/proc/PID/fd/N" of this process.
  std::string name() const;
  std::byte* data() const { return data_; }
  std::uint64_t bytes() const { return bytes_; }
  std::span<std::byte> span() const { return {data_, bytes_}; }
  /// All of it, to be registered so that peers on this host can map it.
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
