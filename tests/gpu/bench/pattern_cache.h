// The KV cache of Llama-3.1-8B in GPU memory, and a pattern that tells where each byte belongs.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/kv_layout.h"
#include "transport/base/device.h"
#include "transport/base/ids.h"

namespace kvferry {

/// 32 layers, 8 heads of 128 bf16 elements, blocks of 16 tokens: 2 MiB a block, laid out as vLLM's FlashAttention has
/// it: [layer][block][k or v][token][head][dim].
class PatternCache {
 public:
  static constexpr std::uint32_t kLayers = 32, kHeads = 8, kDim = 128, kBlockTokens = 16;
  static constexpr std::uint64_t kRowBytes = std::uint64_t{kHeads} * kDim * 2;  // K or V of a token in a layer
  static constexpr std::uint64_t kTokenBytes = kRowBytes * 2 * kLayers;

  PatternCache(Device& device, std::uint32_t num_blocks);
  ~PatternCache();
  PatternCache(const PatternCache&) = delete;
  PatternCache& operator=(const PatternCache&) = delete;

  const KvLayout& layout() const { return layout_; }
  /// Writes the pattern of tokens [0, num_tokens), which lie in these blocks, and zeros everywhere else. Returns when
  /// the GPU has the bytes.
  void write(const std::vector<BlockId>& blocks, std::uint32_t num_tokens, std::uint64_t seed);
  /// Returns how many of the tokens [0, num_tokens) in these blocks have a byte that differs from the pattern.
  std::uint32_t count_wrong(const std::vector<BlockId>& blocks, std::uint32_t num_tokens, std::uint64_t seed) const;

 private:
  static constexpr std::uint64_t kPlaneBytes = kRowBytes * kBlockTokens, kBlockBytes = kPlaneBytes * 2;
  std::uint64_t layer_bytes() const { return kBlockBytes * num_blocks_; }
  /// Returns where K or V of a token lies in a layer.
  static std::uint64_t row_at(const std::vector<BlockId>& blocks, std::uint32_t token, std::uint32_t plane);
  void copy(std::byte* to, const std::byte* from) const;

  Device& device_;
  const std::uint32_t num_blocks_;
  std::byte* memory_ = nullptr;
  std::byte* staging_ = nullptr;  // a layer in pinned host memory
  KvLayout layout_;
};

}  // namespace kvferry
