// An engine's blocks under a stream that runs late: what it writes, saves and reads is in the stream's order, and a
// second cache tells at once what the first will hold then.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "connector/core/plan.h"
#include "kernels/packer.h"
#include "tests/device/sim_packer.h"
#include "tests/kernels/test_cache.h"

namespace kvferry {

class ToyEngine {
 public:
  static constexpr std::uint32_t kBlockTokens = 4, kNumBlocks = 12, kChunkTokens = 8;

  /// nullptr: everything is done at once.
  explicit ToyEngine(SimDevice* device);
  ~ToyEngine();

  const KvLayout& layout() const { return real_.layout(); }
  DeviceStream stream() const { return stream_; }
  std::uint64_t chunk_bytes() const { return kChunkTokens * packer_->chunk_bytes_per_token(); }

  /// Other KV in the block.
  void overwrite(BlockId block, std::uint32_t seed);
  /// What a gather in the stream would give now.
  std::vector<std::byte> expected(const TokenRun& run) const;
  /// A load has put `chunk` there, as far as the stream is concerned.
  void note_loaded(std::span<const std::byte> chunk, std::uint32_t chunk_tokens, std::uint32_t skip,
                   const TokenRun& run);
  /// Reads tokens in the stream; num_wrong() counts what is not as expected().
  void read(const TokenRun& run);
  std::uint64_t num_wrong() const { return *num_wrong_; }

 private:
  SimDevice* device_;
  DeviceStream stream_ = nullptr;
  TestCache real_, mirror_;
  std::shared_ptr<Packer> packer_;
  std::unique_ptr<Packer> mirror_packer_;
  std::shared_ptr<std::uint64_t> num_wrong_ = std::make_shared<std::uint64_t>(0);
};

/// A job of one item: the first `num_tokens` tokens of these blocks.
SaveJob save_job(const std::string& request, ChunkRef chunk, const std::vector<BlockId>& blocks,
                 std::uint32_t num_tokens, std::uint32_t first_token = 0);
LoadJob load_job(const std::string& request, ChunkRef chunk, std::uint64_t checksum, std::uint32_t chunk_tokens,
                 const std::vector<BlockId>& blocks, std::uint32_t num_tokens, std::uint32_t skip_tokens = 0);

}  // namespace kvferry
