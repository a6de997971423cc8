// Two processes with memory on one GPU, and a transport between them: this one, and bin/gpu_far_side, which only offers
// its memory.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/stream_packer.h"
#include "transport/transport.h"

namespace kvferry {

/// What moves GPU memory within a host: "gpu_ipc" or "ucx". kUnavailable: it does not on this machine, and why.
Result<std::unique_ptr<Transport>> make_gpu_transport(std::string_view backend, Device& device);

/// Byte `offset` of the far side's memory at the start.
inline std::byte far_byte(std::uint64_t offset) { return static_cast<std::byte>((offset * 2654435761U) >> 13); }

class GpuPair {
 public:
  /// Both sides have `bytes` bytes. kUnavailable: no GPU, or the backend does not reach its memory.
  static Result<std::unique_ptr<GpuPair>> start(std::string_view backend, std::uint64_t bytes);
  ~GpuPair();
  GpuPair(const GpuPair&) = delete;
  GpuPair& operator=(const GpuPair&) = delete;

  Device& device() { return *gpu_.device; }
  Transport& transport() { return *transport_; }
  std::byte* memory() { return memory_; }
  std::uint64_t bytes() const { return bytes_; }
  /// Submits and waits.
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
  int to_child_ = -1, child_ = -1;
};

/// Blocks of `block_bytes` in an order of the seed's, different on both sides.
std::vector<CopyRange> shuffled_blocks(std::uint64_t bytes, std::uint64_t block_bytes, std::uint32_t seed);

}  // namespace kvferry
