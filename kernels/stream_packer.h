// Gather and scatter of KV that lies in GPU memory: many chunks, all layers and all blocks in one launch.
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

/// Some tokens of one chunk, as in Packer's calls. The block ids are read before a call returns.
struct PackerJob {
  TokenRun run;
  std::byte* chunk = nullptr;  // device memory or pinned
  std::size_t chunk_bytes = 0;
  std::uint32_t chunk_tokens = 0;  // for a gather: run.num_tokens
  std::uint32_t skip_tokens = 0;   // for a gather: 0
};

/// Threads: one at a time. All work of a pass goes to its stream, in order; nothing waits on the host but where it says
/// so.
class StreamPacker {
 public:
  /// Some jobs on their way through the layers, of one direction.
  class Pass {
   public:
    virtual ~Pass() = default;
    /// Copies these layers; a gather's layers come in order, each once. kUnavailable: the device refused the launch.
    virtual Result<void> copy_layers(std::uint32_t first, std::uint32_t end) = 0;
    /// After the last layer: asks for the checksums of the chunks, where they are wanted. Returns at once.
    virtual Result<void> finish() = 0;
    /// Whether all work of the pass has ended on the device.
    virtual Result<bool> is_done() const = 0;
    /// Waits for that. One checksum for each job; empty where none are wanted.
    virtual Result<std::vector<std::uint64_t>> wait() = 0;
  };

  virtual ~StreamPacker() = default;
  virtual const KvLayout& layout() const = 0;
  virtual std::uint64_t chunk_bytes_per_token() const = 0;

  /// kInvalidArgument: a job that Packer::gather() would refuse; nothing is copied. kFull: no memory for the pass.
  virtual Result<std::unique_ptr<Pass>> gather(std::span<const PackerJob> jobs, DeviceStream stream,
                                               bool wants_checksums) = 0;
  /// As gather(). The checksums are those of the whole chunks, as they were read, whatever part of them is scattered.
  virtual Result<std::unique_ptr<Pass>> scatter(std::span<const PackerJob> jobs, DeviceStream stream,
                                                bool wants_checksums) = 0;
};

/// What a build with CUDA has to offer; what takes one works on any.
struct Gpu {
  std::shared_ptr<Device> device;
  /// kInvalidArgument: as make_host_packer(). The packer must not outlive the device.
  std::function<Result<std::unique_ptr<StreamPacker>>(KvLayout, ChunkFormat)> make_packer;
};

/// The GPU with this number. kUnavailable: this build has no CUDA, or there is no such GPU, and why.
Result<Gpu> open_gpu(int ordinal);

}  // namespace kvferry
