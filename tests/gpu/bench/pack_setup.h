// A cache in GPU memory whose blocks are in random order, a packer for it, and chunks of 256 tokens to gather into and
// to scatter from.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "kernels/cuda/cuda_device.h"
#include "tests/gpu/bench/bench_tools.h"
#include "tests/gpu/device_cache.h"

namespace kvferry {

/// Memory of a device, freed at the end.
class BenchMemory {
 public:
  BenchMemory(Device& device, MemoryKind kind, std::uint64_t bytes)
      : device_(device), kind_(kind), bytes_(bytes), data_(must(device.allocate(kind, bytes))) {}
  ~BenchMemory() { device_.release(kind_, data_); }
  BenchMemory(const BenchMemory&) = delete;
  BenchMemory& operator=(const BenchMemory&) = delete;
  std::byte* data() const { return data_; }
  std::uint64_t size() const { return bytes_; }

 private:
  Device& device_;
  const MemoryKind kind_;
  const std::uint64_t bytes_;
  std::byte* const data_;
};

class PackSetup {
 public:
  static constexpr std::uint32_t kChunkTokens = 256;

  /// `num_tokens`: at most what the blocks of the shape hold.
  PackSetup(const CacheShape& shape, std::uint32_t num_tokens, const ChunkFormat& format = {})
      : num_tokens_(num_tokens),
        num_layers_(shape.layers),
        cache_(shape),
        packer_(must(make_cuda_packer(0, cache_.layout(), format))),
        tables_(1, shuffled(0, static_cast<BlockId>(shape.blocks), 1)) {}

  std::uint64_t bytes() const { return num_tokens_ * packer_->chunk_bytes_per_token(); }
  std::uint64_t chunk_bytes() const { return kChunkTokens * packer_->chunk_bytes_per_token(); }
  /// Returns one job for each chunk; the chunks lie one after another from `chunks` on.
  std::vector<PackerJob> jobs(std::byte* chunks, MemoryKind memory = MemoryKind::kDevice) const {
    std::vector<PackerJob> made;
    for (std::uint32_t first = 0; first < num_tokens_; first += kChunkTokens) {
      const std::uint32_t tokens = std::min(kChunkTokens, num_tokens_ - first);
      made.push_back({TokenRun{first, tokens, tables_}, chunks + first * packer_->chunk_bytes_per_token(),
                      tokens * packer_->chunk_bytes_per_token(), tokens, 0, memory});
    }
    return made;
  }
  /// Enqueues a whole pass. The pass must be kept until the clock has stopped, because its destructor waits.
  std::unique_ptr<StreamPacker::Pass> start(std::span<const PackerJob> jobs, bool gathers, bool hashes,
                                            DeviceStream stream) const {
    auto pass = must(gathers ? packer_->gather(jobs, stream, hashes) : packer_->scatter(jobs, stream, hashes));
    must(pass->copy_layers(0, num_layers_));
    must(pass->finish());
    return pass;
  }

 private:
  std::uint32_t num_tokens_, num_layers_;
  DeviceCache cache_;
  std::unique_ptr<StreamPacker> packer_;
  std::vector<std::vector<BlockId>> tables_;
};

}  // namespace kvferry
