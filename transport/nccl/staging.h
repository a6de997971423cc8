// Device buffers through which small ranges go, one for each channel. Kept until the transport ends, because releasing
// device memory waits for all work of the device. Private to this folder.
#pragma once

#include <cstddef>
#include <future>
#include <utility>
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

  /// Returns a buffer of kPieceBytesMax. A new one is allocated on another thread, because that may wait for the
  /// device's work, and so for a communicator of this thread.
  std::future<Result<std::byte*>> take() {
    if (free_.empty())
      return std::async(std::launch::async, [this] { return device_.allocate(MemoryKind::kDevice, kPieceBytesMax); });
    std::promise<Result<std::byte*>> ready;
    ready.set_value(free_.back());
    free_.pop_back();
    return ready.get_future();
  }
  void give_back(std::byte* buffer) { free_.push_back(buffer); }

 private:
  Device& device_;
  std::vector<std::byte*> free_;
};

}  // namespace kvferry::nccl
