#include "tests/connector/runtime/toy_engine.h"

#include <random>

#include "transport/base/check.h"

namespace kvferry {
namespace {

std::vector<std::byte> random_bytes(std::size_t size, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<std::byte> bytes(size);
  for (std::byte& b : bytes) b = static_cast<std::byte>(random());
  return bytes;
}

}  // namespace

ToyCaches::ToyCaches(bool has_unlike_layers) {
  CacheShape shape{.blocks = ToyEngine::kNumBlocks, .block_tokens = ToyEngine::kBlockTokens};
  std::vector<CacheShape> shapes = {shape};
  if (has_unlike_layers) {
    shapes.push_back({.layers = 1,
                      .blocks = 2 * ToyEngine::kNumBlocks,
                      .heads = 1,
                      .block_tokens = ToyEngine::kBlockTokens / 2,
                      .head_dim = 3,
                      .element_bytes = 1});
    shape.layers = 1;
    shapes.push_back(shape);
  }
  for (std::size_t i = 0; i < shapes.size(); ++i) {
    caches_.push_back(std::make_unique<TestCache>(shapes[i]));
    layouts_.push_back(caches_.back()->layout());
    for (LayerLayout& layer : layouts_.back().layers) layer.group = i == 1 ? 1 : 0;
    packers_.push_back(make_host_packer(layouts_.back()).value());
  }
}

void ToyCaches::gather(const TokenRun& run, std::span<std::byte> chunk) const {
  const std::vector<std::vector<BlockId>> tables = toy_tables(run.block_ids[0]);
  for (const auto& packer : packers_) {
    const std::uint64_t bytes = run.num_tokens * packer->chunk_bytes_per_token();
    KVFERRY_CHECK(packer->gather({run.first_token, run.num_tokens, tables}, chunk.first(bytes)), "no such blocks");
    chunk = chunk.subspan(bytes);
  }
}

void ToyCaches::scatter(std::span<const std::byte> chunk, std::uint32_t chunk_tokens, std::uint32_t skip_tokens,
                        const TokenRun& run) const {
  const std::vector<std::vector<BlockId>> tables = toy_tables(run.block_ids[0]);
  for (const auto& packer : packers_) {
    const std::uint64_t bytes = chunk_tokens * packer->chunk_bytes_per_token();
    KVFERRY_CHECK(
        packer->scatter(chunk.first(bytes), chunk_tokens, skip_tokens, {run.first_token, run.num_tokens, tables}),
        "no such blocks");
    chunk = chunk.subspan(bytes);
  }
}

ToyEngine::ToyEngine(SimDevice* device, bool has_unlike_layers)
    : device_(device), real_(std::make_shared<ToyCaches>(has_unlike_layers)), mirror_(has_unlike_layers) {
  if (device_ != nullptr) stream_ = device_->make_stream().value();
}

ToyEngine::~ToyEngine() {
  if (device_ == nullptr) return;
  device_->run_all();
  device_->drop_stream(stream_);
}

void ToyEngine::overwrite(BlockId block, std::uint32_t seed) {
  const std::vector<std::vector<BlockId>> table = {{block}};
  const auto bytes = random_bytes(kBlockTokens * real_->bytes_per_token(), seed);
  note_loaded(bytes, kBlockTokens, 0, {0, kBlockTokens, table});
  const auto work = [caches = real_, table, bytes] {
    caches->scatter(bytes, kBlockTokens, 0, {0, kBlockTokens, table});
    return true;
  };
  if (device_ != nullptr)
    device_->enqueue(stream_, work);
  else
    work();
}

std::vector<std::byte> ToyEngine::expected(const TokenRun& run) const {
  std::vector<std::byte> bytes(run.num_tokens * mirror_.bytes_per_token());
  mirror_.gather(run, bytes);
  return bytes;
}

void ToyEngine::note_loaded(std::span<const std::byte> chunk, std::uint32_t chunk_tokens, std::uint32_t skip,
                            const TokenRun& run) {
  mirror_.scatter(chunk, chunk_tokens, skip, run);
}

void ToyEngine::read(const TokenRun& run) {
  std::vector<std::vector<BlockId>> table(run.block_ids.begin(), run.block_ids.end());
  const auto work = [caches = real_, wrong = num_wrong_, table = std::move(table), want = expected(run),
                     first = run.first_token, count = run.num_tokens] {
    std::vector<std::byte> got(want.size());
    caches->gather({first, count, table}, got);
    *wrong += got == want ? 0 : 1;
    return true;
  };
  if (device_ != nullptr)
    device_->enqueue(stream_, work);
  else
    work();
}

std::vector<std::vector<BlockId>> toy_tables(const std::vector<BlockId>& blocks) {
  std::vector<std::vector<BlockId>> tables = {blocks, {}};
  for (const BlockId block : blocks) {
    const bool is_none = block == kNoBlock;
    tables[1].push_back(is_none ? kNoBlock : 2 * block);
    tables[1].push_back(is_none ? kNoBlock : 2 * block + 1);
  }
  return tables;
}

SaveJob save_job(const std::string& request, ChunkRef chunk, const std::vector<BlockId>& blocks,
                 std::uint32_t num_tokens, std::uint32_t first_token) {
  return {request, toy_tables(blocks), {{chunk, first_token, num_tokens}}};
}

LoadJob load_job(const std::string& request, ChunkRef chunk, std::uint64_t checksum, std::uint32_t chunk_tokens,
                 const std::vector<BlockId>& blocks, std::uint32_t num_tokens, std::uint32_t skip_tokens) {
  LoadJob job{request, 1, toy_tables(blocks), {}};
  job.items.push_back({chunk, {checksum}, chunk_tokens, skip_tokens, 0, num_tokens});
  return job;
}

}  // namespace kvferry
