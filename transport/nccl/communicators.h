// Interface to NCCL's point-to-point operations without NCCL's header; a simulation implements it in tests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "transport/base/device.h"
#include "transport/base/result.h"
#include "transport/make_transport.h"

namespace kvferry::nccl {

/// One rank of a communicator of two ranks. Used by the progress thread only. No method blocks. Bytes are sent in one
/// direction only, because sends in opposite directions could wait for each other.
class Communicator {
 public:
  enum class State {
    // The communicator is being set up, posts its last group, or is being aborted. Neither it nor its stream may be
    // given work.
    kBusy,
    kReady,   // the communicator accepts work
    kFailed,  // the communicator has failed; only abort() may be called
    kAborted  // the communicator is aborted and no longer touches memory
  };

  /// Precondition: the communicator is aborted, or was never given work.
  virtual ~Communicator() = default;
  virtual State state() = 0;
  /// Returns why the communicator has failed. Precondition: state() is kFailed.
  virtual std::string why() const = 0;
  /// Posts all parts as one group, in the stream's order; the other rank must call receive() with the same sizes. The
  /// stream waits for the other rank without a limit. After an error the communicator has failed.
  virtual Result<void> send(std::span<const std::span<std::byte>> parts, DeviceStream stream) = 0;
  virtual Result<void> receive(std::span<const std::span<std::byte>> parts, DeviceStream stream) = 0;
  /// Ends the operations that the stream waits for, whatever state the other rank is in. The communicator may touch
  /// memory until state() is kAborted.
  virtual void abort() = 0;
};

class Communicators {
 public:
  virtual ~Communicators() = default;
  /// Returns the library's name and version, for example "NCCL 2.32.3".
  virtual std::string describe() const = 0;
  /// Returns the id of a new communicator, which both ranks pass to begin().
  virtual Result<std::string> make_id() = 0;
  /// Begins to set up a communicator. The other rank may begin later, or never.
  virtual Result<std::unique_ptr<Communicator>> begin(const std::string& id, int rank) = 0;
};

/// Loads NCCL for memory of `device`. `path`: a libnccl.so.2; empty: KVFERRY_NCCL_LIBRARY, or the loader's search path.
/// kUnavailable: this build has no NCCL, the library is missing or too old (the message then says what to install),
/// `device` is no CUDA device, or NCCL can't start. Other errors: those of Device::allocate().
Result<std::unique_ptr<Communicators>> open_nccl(const std::string& path, Device& device);
/// Returns the version, like "NCCL 2.32.3". Needs no GPU. kUnavailable: this build has no NCCL, or the library is
/// missing or too old.
Result<std::string> find_nccl(const std::string& path);

/// Makes an NCCL transport over any implementation of Communicators. Errors: those of make_nccl_transport().
Result<std::unique_ptr<Transport>> make_transport_over(std::unique_ptr<Communicators> communicators,
                                                       const NcclOptions& options);

}  // namespace kvferry::nccl
