// GPU memory that processes of one host share by CUDA's IPC handles. Private to this folder.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <span>
#include <string>

#include "transport/base/result.h"

namespace kvferry {

/// Exports GPU memory to other processes, and maps GPU memory that they export. Threads: any. The GPU of the memory
/// must be the calling thread's current device.
class SharedAllocations {
 public:
  /// Returns a handle for open(). Errors: kUnavailable if the memory is not from cudaMalloc() (but from PyTorch's
  /// expandable segments, for example), does not lie in one allocation, or can't be exported for another reason.
  Result<std::string> export_memory(std::span<const std::byte> memory);
  /// Maps memory of another process and returns its address. For a handle of this process, returns the memory's own
  /// address, since CUDA can't open a handle in the process that made it. Errors: kCorrupt if the handle is malformed,
  /// covers fewer than `bytes` bytes, claims a larger allocation than there is, or names memory of this process that
  /// was not exported; kUnavailable or kFull if CUDA can't open it.
  Result<std::byte*> open(const std::string& exported, std::uint64_t bytes);
  void close(std::byte* memory);

 private:
  /// A mapped allocation of another process, in which several regions may lie.
  struct Opened {
    std::string handle;
    std::uint64_t bytes = 0;
    std::uint32_t num_users = 0;
  };

  Result<std::byte*> own_memory(std::uint64_t address, std::uint64_t bytes);

  std::mutex mutex_;
  // Key: address of exported memory; value: bytes of the longest export from this address.
  std::map<std::uint64_t, std::uint64_t> exported_;
  std::map<std::byte*, Opened> opened_;  // key: address of the mapping in this process
};

}  // namespace kvferry
