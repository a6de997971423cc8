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

/// The caches of layers, and their packers. A chunk has the bytes of each cache, one after the other.
class ToyCaches {
 public:
  explicit ToyCaches(bool has_unlike_layers);
  const std::vector<KvLayout>& layouts() const { return layouts_; }
  std::uint64_t bytes_per_token() const { return kvferry::bytes_per_token(layouts_); }
  void gather(const TokenRun& run, std::span<std::byte> chunk) const;
  void scatter(std::span<const std::byte> chunk, std::uint32_t chunk_tokens, std::uint32_t skip_tokens,
               const TokenRun& run) const;

 private:
  std::vector<std::unique_ptr<TestCache>> caches_;
  std::vector<KvLayout> layouts_;
  std::vector<std::unique_ptr<Packer>> packers_;
};

/// Takes of a run's block tables only the first one, and finds the blocks of KV group 1 as toy_tables() does.
class ToyEngine {
 public:
  static constexpr std::uint32_t kBlockTokens = 4, kNumBlocks = 12, kChunkTokens = 8;

  /// `device` is nullptr: all work is done at once. `has_unlike_layers`: there are three layouts, of which the second
  /// one is in KV group 1 and has shorter blocks, and rows of so few bytes that the third one's are not aligned.
  explicit ToyEngine(SimDevice* device, bool has_unlike_layers = false);
  ~ToyEngine();

  const std::vector<KvLayout>& layouts() const { return real_->layouts(); }
  DeviceStream stream() const { return stream_; }
  std::uint64_t chunk_bytes() const { return kChunkTokens * real_->bytes_per_token(); }

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
  std::shared_ptr<const ToyCaches> real_;
  ToyCaches mirror_;
  std::shared_ptr<std::uint64_t> num_wrong_ = std::make_shared<std::uint64_t>(0);
};

/// Returns the block tables of both KV groups: these blocks, and for each of them the two shorter blocks of group 1.
std::vector<std::vector<BlockId>> toy_tables(const std::vector<BlockId>& blocks);

/// Returns a job of one item: the first `num_tokens` tokens of these blocks.
SaveJob save_job(const std::string& request, ChunkRef chunk, const std::vector<BlockId>& blocks,
                 std::uint32_t num_tokens, std::uint32_t first_token = 0);
LoadJob load_job(const std::string& request, ChunkRef chunk, std::uint64_t checksum, std::uint32_t chunk_tokens,
                 const std::vector<BlockId>& blocks, std::uint32_t num_tokens, std::uint32_t skip_tokens = 0);

}  // namespace kvferry
