// GPU memory that processes of one host lend each other by CUDA's handles. Private to this folder.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <span>
#include <string>

#include "transport/base/result.h"

namespace kvferry {

/// Threads: any; the device must be current.
class SharedAllocations {
 public:
  /// kUnavailable: it is no memory of cudaMalloc() (expandable segments, for one), or not in one allocation.
  Result<std::string> lend(std::span<const std::byte> memory) const;
  /// Memory of this process lies where it always did: CUDA opens only other processes'.
  Result<std::byte*> open(const std::string& lent);
  void close(std::byte* memory);

 private:
  /// A handle names a whole allocation, in which several regions may lie.
  struct Opened {
    std::string handle;
    std::uint64_t bytes = 0;
    std::uint32_t num_users = 0;
  };

  std::mutex mutex_;
  std::map<std::byte*, Opened> opened_;  // by where it begins here
};

}  // namespace kvferry
