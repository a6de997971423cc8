// Chunk keys of earlier prompts, found by the engine's own digests, so that these prompts are not hashed again.
#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <string_view>
#include <unordered_map>

#include "connector/core/token_chain.h"
#include "transport/base/chunk_key.h"

namespace kvferry {

/// The first 128 bits of a cryptographic digest with which the engine names all tokens from the first one to a chunk's
/// end. Two requests with equal root keys (chunk_key.h) and equal digests at a chunk's end have equal chunks up to it.
using EngineDigest = ChunkKey;
/// Returns the first 128 bits of `digest`, which must not be shorter.
EngineDigest engine_digest(std::string_view digest);

class KnownKeys {
 public:
  /// At least the last `num_kept` keys that were recalled or remembered are kept, and at most 2 * num_kept keys.
  explicit KnownKeys(std::size_t num_kept) : num_kept_(num_kept) {}

  /// Gives the chain the keys of its first chunks, up to the first chunk whose key is not known. digests[i] belongs to
  /// chunk i.
  void recall(std::span<const EngineDigest> digests, TokenChain& chain);
  /// Remembers the keys of the chain's chunks from index `first` on that were hashed and have a digest.
  void remember(std::span<const EngineDigest> digests, const TokenChain& chain, std::size_t first);
  std::size_t size() const { return recent_.size() + earlier_.size(); }

 private:
  struct Name {
    ChunkKey root;
    EngineDigest digest;
    bool operator==(const Name&) const = default;
  };
  struct HashOfName {
    std::size_t operator()(const Name& name) const {
      return std::hash<ChunkKey>()(name.root) ^ std::hash<EngineDigest>()(name.digest);
    }
  };
  using Keys = std::unordered_map<Name, ChunkKey, HashOfName>;
  void add(const Name& name, const ChunkKey& key);

  std::size_t num_kept_;
  Keys recent_, earlier_;  // when `recent_` is full, it replaces `earlier_`
};

}  // namespace kvferry
