// Chunk keys: a key is derived from everything that a chunk's KV is computed from, so equal keys name equal KV.
//
// A key is the first 128 bits of SHA-256 over (the kind of the key, parent key, what else changes this chunk's KV,
// token ids as little-endian int32). The first chunk's parent is the root key of (model fingerprint, what else changes
// the request's KV), so equal keys mean equal model, equal prefix and equal tokens, on every node, whatever the node's
// TP size, block size, vLLM version or PYTHONHASHSEED.
#pragma once

#include <fmt/format.h>

#include <array>
#include <compare>
#include <cstdint>
#include <cstring>
#include <functional>
#include <span>
#include <string>
#include <string_view>

namespace kvferry {

struct ChunkKey {
  std::array<std::uint8_t, 16> bytes{};
  auto operator<=>(const ChunkKey&) const = default;
  std::string hex() const;
  /// Returns the first 8 bytes. The key is a cryptographic digest, so every value is as likely as any other.
  std::uint64_t first_word() const {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes.data(), sizeof word);
    return word;
  }
};

/// Returns the first chunk's parent key. `extras`: what else changes KV (a LoRA's digest, cache_salt), or empty.
ChunkKey root_key(std::string_view fingerprint, std::string_view extras);

/// Returns the key of the chunk that follows `parent` and holds `tokens`, in order. `extras`: what else changes the KV
/// of this chunk (the multimodal items in it), or empty.
ChunkKey chunk_key(const ChunkKey& parent, std::span<const std::int32_t> tokens, std::string_view extras = {});

/// A lookup does not know the length, and so not the key, of a stored tail (a chunk shorter than chunk_tokens). The
/// lookup finds tails by the key of their group, which is derived from the parent, the first kTailGroupTokens tokens
/// and what else changes the KV of these tokens (`extras`). A tail with fewer tokens belongs to no group and is found
/// by its exact key alone.
constexpr std::size_t kTailGroupTokens = 16;
ChunkKey tail_group_key(const ChunkKey& parent, std::span<const std::int32_t> first_tokens,
                        std::string_view extras = {});

}  // namespace kvferry

template <>
struct std::hash<kvferry::ChunkKey> {
  std::size_t operator()(const kvferry::ChunkKey& key) const noexcept { return key.first_word(); }
};

template <>
struct fmt::formatter<kvferry::ChunkKey> : fmt::formatter<std::string> {
  template <class Context>
  auto format(const kvferry::ChunkKey& key, Context& ctx) const {
    return fmt::formatter<std::string>::format(key.hex(), ctx);
  }
};
