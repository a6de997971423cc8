#include "tests/connector/runtime/toy_engine.h"

#include <random>

#include "transport/base/check.h"

namespace kvferry {
namespace {

CacheShape toy_shape() {
  CacheShape shape;
  shape.blocks = ToyEngine::kNumBlocks;
  shape.block_tokens = ToyEngine::kBlockTokens;
  return shape;
}

std::vector<std::byte> random_bytes(std::size_t size, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<std::byte> bytes(size);
  for (std::byte& b : bytes) b = static_cast<std::byte>(random());
  return bytes;
}

}  // namespace

ToyEngine::ToyEngine(SimDevice* device)
    : device_(device),
      real_(toy_shape()),
      mirror_(toy_shape()),
      packer_(make_host_packer(real_.layout()).value()),
      mirror_packer_(make_host_packer(mirror_.layout()).value()) {
  if (device_ != nullptr) stream_ = device_->make_stream().value();
}

ToyEngine::~ToyEngine() {
  if (device_ == nullptr) return;
  device_->run_all();
  device_->drop_stream(stream_);
}

void ToyEngine::overwrite(BlockId block, std::uint32_t seed) {
  const std::vector<std::vector<BlockId>> table = {{block}};
  const auto bytes = random_bytes(kBlockTokens * packer_->chunk_bytes_per_token(), seed);
  note_loaded(bytes, kBlockTokens, 0, {0, kBlockTokens, table});
  const auto work = [packer = packer_, table, bytes] {
    KVFERRY_CHECK(packer->scatter(bytes, kBlockTokens, 0, {0, kBlockTokens, table}), "the engine can't write");
    return true;
  };
  if (device_ != nullptr)
    device_->enqueue(stream_, work);
  else
    work();
}

std::vector<std::byte> ToyEngine::expected(const TokenRun& run) const {
  std::vector<std::byte> bytes(run.num_tokens * packer_->chunk_bytes_per_token());
  KVFERRY_CHECK(mirror_packer_->gather(run, bytes), "the test names no blocks");
  return bytes;
}

void ToyEngine::note_loaded(std::span<const std::byte> chunk, std::uint32_t chunk_tokens, std::uint32_t skip,
                            const TokenRun& run) {
  KVFERRY_CHECK(mirror_packer_->scatter(chunk, chunk_tokens, skip, run), "the test names no blocks");
}

void ToyEngine::read(const TokenRun& run) {
  std::vector<std::vector<BlockId>> table(run.block_ids.begin(), run.block_ids.end());
  const auto work = [packer = packer_, wrong = num_wrong_, table = std::move(table), want = expected(run),
                     first = run.first_token, count = run.num_tokens] {
    std::vector<std::byte> got(want.size());
    KVFERRY_CHECK(packer->gather({first, count, table}, got), "the engine can't read");
    *wrong += got == want ? 0 : 1;
    return true;
  };
  if (device_ != nullptr)
    device_->enqueue(stream_, work);
  else
    work();
}

SaveJob save_job(const std::string& request, ChunkRef chunk, const std::vector<BlockId>& blocks,
                 std::uint32_t num_tokens, std::uint32_t first_token) {
  return {request, {blocks}, {{chunk, first_token, num_tokens}}};
}

LoadJob load_job(const std::string& request, ChunkRef chunk, std::uint64_t checksum, std::uint32_t chunk_tokens,
                 const std::vector<BlockId>& blocks, std::uint32_t num_tokens, std::uint32_t skip_tokens) {
  LoadJob job{request, 1, {blocks}, {}};
  job.items.push_back({chunk, {checksum}, chunk_tokens, skip_tokens, 0, num_tokens});
  return job;
}

}  // namespace kvferry
