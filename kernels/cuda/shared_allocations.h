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
  Result<std::string> lend(std::span<const std::byte> memory);
  /// Memory of this process lies where it always did: CUDA opens only other processes'. kCorrupt: nobody lent that, or
  /// not so many bytes.
  Result<std::byte*> open(const std::string& lent, std::uint64_t bytes);
  void close(std::byte* memory);

 private:
  /// A handle names a whole allocation, in which several regions may lie.
  struct Opened {
    std::string handle;
    std::uint64_t bytes = 0;
    std::uint32_t num_users = 0;
  };

  Result<std::byte*> own(std::uint64_t address, std::uint64_t bytes);

  std::mutex mutex_;
  std::map<std::uint64_t, std::uint64_t> lent_;  // by address: bytes, the most of it
  std::map<std::byte*, Opened> opened_;          // by where it begins here
};

}  // namespace kvferry
