// Device memory through which small ranges go, one buffer a channel. Kept until the transport ends, because giving
// device memory back waits for all that the device does. Private to this folder.
#pragma once

#include <cstddef>
#include <vector>

#include "transport/base/device.h"
#include "transport/nccl/messages.h"

namespace kvferry::nccl {

/// Progress thread only.
class StagingPool {
 public:
  explicit StagingPool(Device& device) : device_(device) {}
  StagingPool(const StagingPool&) = delete;
  StagingPool& operator=(const StagingPool&) = delete;
  ~StagingPool() {
    for (std::byte* const buffer : free_) device_.release(MemoryKind::kDevice, buffer);
  }

  /// Of kPieceBytesMax.
  Result<std::byte*> take() {
    if (free_.empty()) return device_.allocate(MemoryKind::kDevice, kPieceBytesMax);
    std::byte* const buffer = free_.back();
    free_.pop_back();
    return buffer;
  }
  void give_back(std::byte* buffer) { free_.push_back(buffer); }

 private:
  Device& device_;
  std::vector<std::byte*> free_;
};

}  // namespace kvferry::nccl
