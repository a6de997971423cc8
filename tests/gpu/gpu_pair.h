// Two processes with memory on one GPU, and a transport between them. The processes are this one and bin/gpu_far_side,
// which only exports its memory.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/stream_packer.h"
#include "tests/gpu/child_process.h"
#include "transport/transport.h"

namespace kvferry {

/// Makes a transport that moves GPU memory within a host: "gpu_ipc", "ucx" or "nccl". kUnavailable: it can't on this
/// machine; the message says why.
Result<std::unique_ptr<Transport>> make_gpu_transport(std::string_view backend, Device& device);

/// Returns the value of byte `offset` in the other process's memory at the start.
inline std::byte far_byte(std::uint64_t offset) { return static_cast<std::byte>((offset * 2654435761U) >> 13); }

class GpuPair {
 public:
  /// Both processes have `bytes` bytes. kUnavailable: there is no GPU, or the backend can't reach its memory.
  static Result<std::unique_ptr<GpuPair>> start(std::string_view backend, std::uint64_t bytes);
  ~GpuPair();
  GpuPair(const GpuPair&) = delete;
  GpuPair& operator=(const GpuPair&) = delete;

  Device& device() { return *gpu_.device; }
  Transport& transport() { return *transport_; }
  std::byte* memory() { return memory_; }
  std::uint64_t bytes() const { return bytes_; }
  /// Submits a transfer and waits until it is complete.
  Completion move(Direction direction, std::vector<CopyRange> ranges, std::vector<std::uint64_t> checksums,
                  std::string notification);
  std::vector<std::byte> read();
  void write(const std::vector<std::byte>& bytes);

 private:
  GpuPair() = default;
  Result<void> spawn(std::string_view backend);

  Gpu gpu_;
  std::unique_ptr<Transport> transport_;
  std::byte* memory_ = nullptr;
  std::uint64_t bytes_ = 0;
  RegionId region_;
  PeerId peer_;
  std::string far_region_;
  std::unique_ptr<ChildProcess> child_;
};

/// Returns ranges that copy blocks of `block_bytes` bytes. Each side has the blocks in a different order, which the
/// seed decides.
std::vector<CopyRange> shuffled_blocks(std::uint64_t bytes, std::uint64_t block_bytes, std::uint32_t seed);

}  // namespace kvferry
