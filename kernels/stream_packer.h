// Gathers and scatters KV in GPU memory. One launch can copy many chunks, with all their layers and blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "kernels/packer.h"
#include "transport/base/device.h"

namespace kvferry {

/// One chunk and the tokens to copy. The fields mean what the arguments of Packer's functions mean. gather() and
/// scatter() read the block ids before they return.
struct PackerJob {
  TokenRun run;
  std::byte* chunk = nullptr;
  std::size_t chunk_bytes = 0;
  std::uint32_t chunk_tokens = 0;  // equal to run.num_tokens for a gather
  std::uint32_t skip_tokens = 0;   // tokens at the chunk's start that a scatter does not copy; 0 for a gather
  /// Where the chunk is. A wrong value costs time only.
  MemoryKind memory = MemoryKind::kDevice;
  /// The bytes that the job's checksum covers, in the same kind of memory. Empty: the chunk. They are hashed after the
  /// copy, so they may include bytes around the chunk that earlier work of the stream writes.
  std::span<const std::byte> hashed = {};
};

/// Gathers and scatters the KV of layers in GPU memory. Threads: one at a time. All work of a pass is enqueued on
/// its stream, in order; only wait() and a pass's destructor may block until that work has ended.
class StreamPacker {
 public:
  /// A group of jobs of one direction (gather or scatter), whose layers are copied in one or more steps.
  class Pass {
   public:
    virtual ~Pass() = default;
    /// Enqueues the copy of layers [first, end). The layers of a pass are copied in order, each once. Errors:
    /// kInvalidArgument if [first, end) are not the next layers, kUnavailable (kFull if GPU memory is exhausted) if the
    /// launch fails.
    virtual Result<void> copy_layers(std::uint32_t first, std::uint32_t end) = 0;
    /// Enqueues the checksums, unless the copies compute them already or the pass has none, and marks the end of the
    /// pass's work on the stream. Must be called after the last layer is enqueued.
    virtual Result<void> finish() = 0;
    /// Returns true if the device has finished all work of the pass; false before finish().
    virtual Result<bool> is_done() const = 0;
    /// Waits until the device has finished. Returns one checksum for each job, or none if the pass has no checksums.
    /// Must be called after finish().
    virtual Result<std::vector<std::uint64_t>> wait() = 0;
  };

  virtual ~StreamPacker() = default;
  virtual std::uint32_t num_layers() const = 0;
  virtual std::uint64_t chunk_bytes_per_token() const = 0;

  /// Makes a pass, whose functions copy the jobs. Errors: kInvalidArgument if Packer::gather() would reject a job, a
  /// field of a job has a value that is not allowed for a gather, or there is no job or too many; kFull if there is no
  /// memory for the pass; kUnavailable if the device fails otherwise.
  virtual Result<std::unique_ptr<Pass>> gather(std::span<const PackerJob> jobs, DeviceStream stream,
                                               bool wants_checksums) = 0;
  /// Same as gather(), for Packer::scatter(). The checksums cover the whole chunks as read, even if only a part of each
  /// chunk is scattered.
  virtual Result<std::unique_ptr<Pass>> scatter(std::span<const PackerJob> jobs, DeviceStream stream,
                                                bool wants_checksums) = 0;
};

/// A GPU, and the function that makes packers for it.
struct Gpu {
  std::shared_ptr<Device> device;
  /// Makes a packer for a cache in this GPU's memory. Errors: those of make_host_packer(), kFull if GPU memory is
  /// exhausted, kUnavailable if the GPU fails otherwise. The packer must not outlive the device.
  std::function<Result<std::unique_ptr<StreamPacker>>(KvLayout, ChunkFormat)> make_packer;
};

/// Opens the GPU with this number. Errors: kUnavailable if this build has no CUDA, or if CUDA has no such GPU or can't
/// query it.
Result<Gpu> open_gpu(int ordinal);

/// Returns a text for users: the architectures that this build has kernels for, and the version of its CUDA runtime, or
/// that this build has no kernels.
std::string gpu_support();

}  // namespace kvferry
