// A named POSIX shared memory segment: the chunk pool's memory, which its creator owns and other processes may map.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "transport/base/result.h"
#include "transport/transport.h"

namespace kvferry {

/// One mapping. The creator holds a lock on the segment for as long as it lives, which the kernel lets go when the
/// process dies in whatever way: that is how create() knows the segments of the dead, in any pid namespace.
/// Threads: any; the object itself is not synchronised.
class SharedMemory {
 public:
  /// Makes a zeroed segment /dev/shm/kvferry-<label>-... with all its pages reserved, so that no later access can fail;
  /// huge pages where the system gives them (transparent_hugepage/shmem_enabled is `advise` or more).
  /// Removes the segments that dead creators left behind first. label: 1 to 64 of [A-Za-z0-9_.].
  /// Errors: kInvalidArgument: bad label or bytes == 0; kUnavailable: not enough shared memory, names `pool_bytes`.
  static Result<SharedMemory> create(std::string_view label, std::uint64_t bytes);
  /// Maps an existing segment for reading and writing. kNotFound: no such segment; it may be unlinked later without
  /// harm.
  static Result<SharedMemory> open(const std::string& name);

  SharedMemory(SharedMemory&& other) noexcept;
  SharedMemory& operator=(SharedMemory&& other) noexcept;
  /// Unmaps; the creator also unlinks the name. Mappings of other processes stay valid.
  ~SharedMemory();

  /// As shm_open() wants it: "/kvferry-...".
  const std::string& name() const { return name_; }
  std::byte* data() const { return data_; }
  std::uint64_t bytes() const { return bytes_; }
  std::span<std::byte> span() const { return {data_, bytes_}; }
  /// To register all of it, so that peers on this host map it as well.
  MemoryRegion region() const { return {data_, bytes_, fd_, 0}; }

 private:
  SharedMemory() = default;

  std::string name_;
  std::byte* data_ = nullptr;
  std::uint64_t bytes_ = 0;
  int fd_ = -1;  // the creator's carries the lock
  bool is_creator_ = false;
};

}  // namespace kvferry
