// A request's tokens and the keys of its chunks. The key of a full chunk is kept until the chunk loses tokens.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "connector/core/chunk_meta.h"
#include "transport/base/chunk_key.h"

namespace kvferry {

/// A multimodal item at tokens [first_token, first_token + num_tokens), whose KV depends on the item's content.
struct TokenExtra {
  std::uint32_t first_token = 0;
  std::uint32_t num_tokens = 0;
  std::string identifier;
};

class TokenChain {
 public:
  TokenChain(const ChunkKey& root, std::uint32_t chunk_tokens, std::vector<TokenExtra> extras, TenantId tenant = 0);

  void append(std::span<const std::int32_t> tokens);
  void append(std::vector<std::int32_t>&& tokens);  // does not copy the tokens if the chain is empty
  /// Drops the tokens from index `num_tokens` on, for example output tokens that the engine has rejected.
  void truncate(std::uint32_t num_tokens);

  std::uint32_t size() const { return static_cast<std::uint32_t>(tokens_.size()); }
  const ChunkKey& root() const { return root_; }
  std::uint32_t chunk_tokens() const { return chunk_tokens_; }
  std::uint32_t num_full_chunks() const { return size() / chunk_tokens_; }

  /// Returns the key of full chunk i. `i` must be less than num_full_chunks().
  const ChunkKey& key(std::uint32_t i);
  std::span<const ChunkKey> keys();
  /// Returns the keys of the full chunks that were hashed or adopted so far.
  std::span<const ChunkKey> hashed_keys() const { return keys_; }
  /// Sets the key of the first full chunk that has none yet, so that the chunk is not hashed.
  void adopt_key(const ChunkKey& key);
  /// Returns the key of the tail that has num_tokens tokens and follows i full chunks.
  ChunkKey tail_key(std::uint32_t i, std::uint32_t num_tokens);
  /// Returns the key of the tail group (chunk_key.h) after i full chunks, nullopt if fewer than kTailGroupTokens tokens
  /// follow these chunks.
  std::optional<ChunkKey> tail_group(std::uint32_t i);
  /// Returns the metadata of the chunk that has num_tokens tokens and follows i full chunks: a full chunk or a tail.
  ChunkMeta meta(std::uint32_t i, std::uint32_t num_tokens);
  /// Returns the metadata of the chunks of the first num_tokens tokens; the last chunk may be a tail.
  std::vector<ChunkMeta> prefix(std::uint32_t num_tokens);

 private:
  const ChunkKey& parent(std::uint32_t i) { return i == 0 ? root_ : key(i - 1); }
  std::string extras_in(std::uint32_t first_token, std::uint32_t num_tokens) const;

  ChunkKey root_;
  std::uint32_t chunk_tokens_;
  std::vector<TokenExtra> extras_;
  TenantId tenant_;
  std::vector<std::int32_t> tokens_;
  std::vector<ChunkKey> keys_;  // keys of the first full chunks
};

}  // namespace kvferry
