#include "connector/core/token_chain.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "transport/base/check.h"

namespace kvferry {

TokenChain::TokenChain(const ChunkKey& root, std::uint32_t chunk_tokens, std::vector<TokenExtra> extras,
                       TenantId tenant)
    : root_(root), chunk_tokens_(chunk_tokens), extras_(std::move(extras)), tenant_(tenant) {
  KVFERRY_CHECK(chunk_tokens_ > 0, "a chunk must have at least 1 token, but chunk_tokens is 0");
}

void TokenChain::append(std::span<const std::int32_t> tokens) {
  tokens_.insert(tokens_.end(), tokens.begin(), tokens.end());
}

void TokenChain::append(std::vector<std::int32_t>&& tokens) {
  if (!tokens_.empty()) return append(std::span<const std::int32_t>(tokens));
  tokens_ = std::move(tokens);
}

void TokenChain::truncate(std::uint32_t num_tokens) {
  if (num_tokens >= size()) return;
  tokens_.resize(num_tokens);
  if (keys_.size() > num_full_chunks()) keys_.resize(num_full_chunks());
}

const ChunkKey& TokenChain::key(std::uint32_t i) {
  KVFERRY_CHECK(i < num_full_chunks(), "chunk {} does not exist: the request's tokens fill {} chunks", i,
                num_full_chunks());
  while (keys_.size() <= i) {
    const auto first = static_cast<std::uint32_t>(keys_.size()) * chunk_tokens_;
    const ChunkKey& before = keys_.empty() ? root_ : keys_.back();
    keys_.push_back(
        chunk_key(before, std::span(tokens_).subspan(first, chunk_tokens_), extras_in(first, chunk_tokens_)));
  }
  return keys_[i];
}

std::span<const ChunkKey> TokenChain::keys() {
  if (num_full_chunks() > 0) key(num_full_chunks() - 1);
  return keys_;
}

void TokenChain::adopt_key(const ChunkKey& key) {
  KVFERRY_CHECK(keys_.size() < num_full_chunks(),
                "no key can be added: all {} full chunks of the request's tokens have keys", num_full_chunks());
  keys_.push_back(key);
}

ChunkKey TokenChain::tail_key(std::uint32_t i, std::uint32_t num_tokens) {
  const std::uint32_t first = i * chunk_tokens_;
  KVFERRY_CHECK(
      num_tokens > 0 && num_tokens < chunk_tokens_ && first + num_tokens <= size(),
      "there is no tail of {} tokens at token {}: a tail has at least 1 token, fewer than a chunk ({}), and ends "
      "within the request's {} tokens",
      num_tokens, first, chunk_tokens_, size());
  return chunk_key(parent(i), std::span(tokens_).subspan(first, num_tokens), extras_in(first, num_tokens));
}

std::optional<ChunkKey> TokenChain::tail_group(std::uint32_t i) {
  const std::uint32_t first = i * chunk_tokens_;
  if (first + kTailGroupTokens > size()) return std::nullopt;
  return tail_group_key(parent(i), std::span(tokens_).subspan(first, kTailGroupTokens),
                        extras_in(first, kTailGroupTokens));
}

ChunkMeta TokenChain::meta(std::uint32_t i, std::uint32_t num_tokens) {
  if (num_tokens == chunk_tokens_) return {key(i), num_tokens, false, {}, 0, tenant_};
  ChunkMeta meta{tail_key(i, num_tokens), num_tokens, true, {}, 0, tenant_};
  if (num_tokens >= kTailGroupTokens) meta.tail_group = tail_group(i);
  return meta;
}

std::vector<ChunkMeta> TokenChain::prefix(std::uint32_t num_tokens) {
  std::vector<ChunkMeta> chunks;
  const std::uint32_t num_full = num_tokens / chunk_tokens_;
  for (std::uint32_t i = 0; i < num_full; ++i) chunks.push_back(meta(i, chunk_tokens_));
  if (const std::uint32_t rest = num_tokens % chunk_tokens_; rest > 0) chunks.push_back(meta(num_full, rest));
  return chunks;
}

std::string TokenChain::extras_in(std::uint32_t first_token, std::uint32_t num_tokens) const {
  std::string text;
  for (const TokenExtra& extra : extras_) {
    if (extra.first_token >= first_token + num_tokens || extra.first_token + extra.num_tokens <= first_token) continue;
    // The number after '@' is the item's first token, counted from the chunk's first token. It is negative if the item
    // began in an earlier chunk.
    text += fmt::format("{}@{};", extra.identifier, std::int64_t{extra.first_token} - first_token);
  }
  return text;
}

}  // namespace kvferry
