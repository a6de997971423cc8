// An engine's blocks, with a stream whose work runs late. The engine writes, saves and reads in the order of the
// stream. A second cache shows at once what the first cache will contain after this work.
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

  /// `device` is nullptr: all work is done at once.
  explicit ToyEngine(SimDevice* device);
  ~ToyEngine();

  const KvLayout& layout() const { return real_.layout(); }
  DeviceStream stream() const { return stream_; }
  std::uint64_t chunk_bytes() const { return kChunkTokens * packer_->chunk_bytes_per_token(); }

  /// Writes new KV into the block.
  void overwrite(BlockId block, std::uint32_t seed);
  /// Returns what a gather at this place of the stream would give.
  std::vector<std::byte> expected(const TokenRun& run) const;
  /// Records that a load of `chunk` into the blocks is in the stream.
  void note_loaded(std::span<const std::byte> chunk, std::uint32_t chunk_tokens, std::uint32_t skip,
                   const TokenRun& run);
  /// Reads tokens in the stream. num_wrong() then counts the tokens that differ from expected().
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

/// Returns a job of one item: the first `num_tokens` tokens of these blocks.
SaveJob save_job(const std::string& request, ChunkRef chunk, const std::vector<BlockId>& blocks,
                 std::uint32_t num_tokens, std::uint32_t first_token = 0);
LoadJob load_job(const std::string& request, ChunkRef chunk, std::uint64_t checksum, std::uint32_t chunk_tokens,
                 const std::vector<BlockId>& blocks, std::uint32_t num_tokens, std::uint32_t skip_tokens = 0);

}  // namespace kvferry
