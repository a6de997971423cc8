#include "tests/gpu/bench/pattern_cache.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "transport/base/check.h"

namespace kvferry {
namespace {

using Row = std::array<std::uint64_t, PatternCache::kRowBytes / sizeof(std::uint64_t)>;

/// Returns the bytes of K or V of a token in a layer.
void fill(Row& row, std::uint64_t seed, std::uint32_t layer, std::uint32_t plane, std::uint32_t token) {
  std::uint64_t x = (seed * 64 + layer * 2 + plane) * 0x9E3779B97F4A7C15U + token * std::uint64_t{0xBF58476D1CE4E5B9U};
  for (std::uint64_t& word : row) {
    x ^= x >> 27;
    x = x * 0x94D049BB133111EBU + 1;
    word = x;
  }
}

template <class T>
T must(Result<T> result) {
  KVFERRY_CHECK(result, "{}", result.error().what);
  return *std::move(result);
}

}  // namespace

PatternCache::PatternCache(Device& device, std::uint32_t num_blocks) : device_(device), num_blocks_(num_blocks) {
  memory_ = must(device.allocate(MemoryKind::kDevice, layer_bytes() * kLayers));
  staging_ = must(device.allocate(MemoryKind::kPinned, layer_bytes()));
  layout_.num_kv_heads = kHeads;
  layout_.head_dim = kDim;
  layout_.element_bytes = 2;
  layout_.block_tokens = kBlockTokens;
  layout_.num_blocks = num_blocks;
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
    const auto base = reinterpret_cast<std::uint64_t>(memory_ + layer * layer_bytes());
    const PlaneLayout key{base, kBlockBytes, kDim * 2, kRowBytes, 2};
    const PlaneLayout value{base + kPlaneBytes, kBlockBytes, kDim * 2, kRowBytes, 2};
    layout_.layers.push_back({"layers." + std::to_string(layer), 0, key, value});
  }
}

PatternCache::~PatternCache() {
  device_.release(MemoryKind::kDevice, memory_);
  device_.release(MemoryKind::kPinned, staging_);
}

std::uint64_t PatternCache::row_at(const std::vector<BlockId>& blocks, std::uint32_t token, std::uint32_t plane) {
  const auto block = static_cast<std::uint64_t>(blocks.at(token / kBlockTokens));
  return block * kBlockBytes + plane * kPlaneBytes + token % kBlockTokens * kRowBytes;
}

void PatternCache::copy(std::byte* to, const std::byte* from) const {
  const DeviceStream stream = must(device_.make_stream());
  const DeviceCopy copies[] = {{to, from, layer_bytes()}};
  const Result<void> ok = device_.copy(copies, stream);
  KVFERRY_CHECK(ok, "{}", ok.error().what);
  const Result<void> ended = must(DeviceEvent::record(device_, stream)).wait();
  KVFERRY_CHECK(ended, "{}", ended.error().what);
  device_.drop_stream(stream);
}

void PatternCache::write(const std::vector<BlockId>& blocks, std::uint32_t num_tokens, std::uint64_t seed) {
  Row row;
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
    std::fill_n(staging_, layer_bytes(), std::byte{0});
    for (std::uint32_t token = 0; token < num_tokens; ++token) {
      for (std::uint32_t plane = 0; plane < 2; ++plane) {
        fill(row, seed, layer, plane, token);
        std::memcpy(staging_ + row_at(blocks, token, plane), row.data(), kRowBytes);
      }
    }
    copy(memory_ + layer * layer_bytes(), staging_);
  }
}

std::uint32_t PatternCache::count_wrong(const std::vector<BlockId>& blocks, std::uint32_t num_tokens,
                                        std::uint64_t seed) const {
  std::vector<bool> is_wrong(num_tokens, false);
  Row row;
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
    copy(staging_, memory_ + layer * layer_bytes());
    for (std::uint32_t token = 0; token < num_tokens; ++token) {
      for (std::uint32_t plane = 0; plane < 2; ++plane) {
        fill(row, seed, layer, plane, token);
        if (std::memcmp(staging_ + row_at(blocks, token, plane), row.data(), kRowBytes) != 0) is_wrong[token] = true;
      }
    }
  }
  return static_cast<std::uint32_t>(std::count(is_wrong.begin(), is_wrong.end(), true));
}

}  // namespace kvferry
