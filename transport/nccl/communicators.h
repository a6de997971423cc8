// NCCL's point-to-point as the transport sees it, without NCCL's header: the library itself, or what stands for it in
// tests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "transport/base/device.h"
#include "transport/base/result.h"

namespace kvferry::nccl {

/// One of two ranks. Nothing here blocks. Progress thread only. Bytes go in one direction, which whoever made the two
/// ranks agreed on: two opposite sends of one communicator could wait for each other.
class Communicator {
 public:
  enum class State {
    kBusy,    // not set up yet, or not through with the last group: give it no work, and its stream none that follows
    kReady,   // takes work
    kFailed,  // takes none any more: abort() it
    kAborted  // touches no memory any more
  };

  /// Aborted, or never given any work.
  virtual ~Communicator() = default;
  virtual State state() = 0;
  /// Once it has failed.
  virtual std::string why() const = 0;
  /// All of them as one group, in the stream's order; the other rank gives receive() the same sizes. A stream may wait
  /// for the other rank for as long as that takes. Any error: it has failed.
  virtual Result<void> send(std::span<const std::span<std::byte>> parts, DeviceStream stream) = 0;
  virtual Result<void> receive(std::span<const std::span<std::byte>> parts, DeviceStream stream) = 0;
  /// Ends what its streams wait for, in whatever state the other rank is. Until kAborted it may still touch memory.
  virtual void abort() = 0;
};

class Communicators {
 public:
  virtual ~Communicators() = default;
  /// "NCCL 2.32.3".
  virtual std::string describe() const = 0;
  /// Names a communicator for its two ranks; travels to the other one.
  virtual Result<std::string> make_id() = 0;
  /// Begins to set it up. The other rank may begin later, or never.
  virtual Result<std::unique_ptr<Communicator>> begin(const std::string& id, int rank) = 0;
};

}  // namespace kvferry::nccl
