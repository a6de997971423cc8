// Shared memory that has no name in the file system. Chunk pools, for example, are such memory; processes of the same
// host can map it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "transport/base/owned_fd.h"
#include "transport/base/result.h"
#include "transport/transport.h"

namespace kvferry {

/// A shared file and its mapping. Threads: any; the object itself is not synchronised.
class SharedMapping {
 public:
  /// Makes a memfd of `bytes` bytes, which can't shrink or grow, maps it, and reserves all its pages, so that no access
  /// fails later (SIGBUS). `name`: shown in /proc/PID/maps. `page_flags`: e.g. MFD_HUGETLB, which rounds the size up.
  /// kFull: there is not enough memory when the pages are reserved; kUnavailable: anything else failed.
  static Result<SharedMapping> create(const std::string& name, std::uint64_t bytes, unsigned page_flags = 0);
  /// Same as create(), but a process that has the descriptor can only read; only this mapping can write. Needs Linux
  /// 5.1.
  static Result<SharedMapping> create_for_readers(const std::string& name, std::uint64_t bytes);
  /// Maps [offset, offset + bytes) of the file, which must have these bytes.
  static Result<SharedMapping> map(OwnedFd fd, std::uint64_t offset, std::uint64_t bytes, bool is_writable = true);

  std::span<std::byte> span() const { return {memory_.get(), bytes_}; }
  int fd() const { return fd_.get(); }

 private:
  struct Unmap {
    std::uint64_t bytes;  // a multiple of the page size
    void operator()(std::byte* memory) const;
  };
  OwnedFd fd_;
  std::unique_ptr<std::byte[], Unmap> memory_;
  std::uint64_t bytes_ = 0;
};

/// Shared memory, which the kernel frees when its last mapping and descriptor are closed, also if processes die. It
/// can't shrink, so no access through a mapping fails. Threads: any; the object itself is not synchronised.
class SharedMemory {
 public:
  /// Makes zeroed memory and reserves all its pages. Memory of kHugePageBytes or more gets huge pages if enough are set
  /// aside (vm.nr_hugepages) or the kernel makes them, see make_huge_pages(). `label`: 1 to 64 characters
  /// [A-Za-z0-9_.], shown in /proc/PID/maps. kInvalidArgument: bad label or size; kUnavailable: not enough memory or
  /// descriptors.
  static Result<SharedMemory> create(std::string_view label, std::uint64_t bytes);
  /// Returns how many bytes create() could get now without the huge pages that are set aside.
  static std::uint64_t available_bytes();
  /// Maps memory that a process of the same user has created, by its name(). kNotFound: the memory can't be opened or
  /// is empty; kUnavailable: the memory can't be mapped.
  static Result<SharedMemory> open(const std::string& name);

  /// Returns "/proc/PID/fd/N" with the PID of this process.
  std::string name() const;
  std::byte* data() const { return span().data(); }
  std::uint64_t bytes() const { return span().size(); }
  std::span<std::byte> span() const { return mapping_.span(); }
  /// Returns all of the memory as a region that peers on this host can map.
  MemoryRegion region() const { return {data(), bytes(), mapping_.fd(), 0}; }

 private:
  explicit SharedMemory(SharedMapping mapping) : mapping_(std::move(mapping)) {}
  static Result<SharedMemory> create_of(const std::string& name, std::uint64_t bytes, unsigned page_flags);

  SharedMapping mapping_;
};

}  // namespace kvferry
