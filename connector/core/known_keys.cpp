#include "connector/core/known_keys.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "transport/base/check.h"

namespace kvferry {

EngineDigest engine_digest(std::string_view digest) {
  EngineDigest first_bytes;
  KVFERRY_CHECK(digest.size() >= first_bytes.bytes.size(),
                "a block hash of vLLM of {} bytes is too short: at least {} are needed", digest.size(),
                first_bytes.bytes.size());
  std::memcpy(first_bytes.bytes.data(), digest.data(), first_bytes.bytes.size());
  return first_bytes;
}

void KnownKeys::recall(std::span<const EngineDigest> digests, TokenChain& chain) {
  for (const EngineDigest& digest : digests.first(std::min<std::size_t>(digests.size(), chain.num_full_chunks()))) {
    const Name name{chain.root(), digest};
    if (const auto found = recent_.find(name); found != recent_.end()) {
      chain.adopt_key(found->second);
    } else if (const auto before = earlier_.find(name); before != earlier_.end()) {
      const ChunkKey key = before->second;
      add(name, key);
      chain.adopt_key(key);
    } else {
      return;
    }
  }
}

void KnownKeys::remember(std::span<const EngineDigest> digests, const TokenChain& chain, std::size_t first) {
  const std::span<const ChunkKey> hashed = chain.hashed_keys();
  for (std::size_t i = first; i < std::min(digests.size(), hashed.size()); ++i)
    add({chain.root(), digests[i]}, hashed[i]);
}

void KnownKeys::add(const Name& name, const ChunkKey& key) {
  if (recent_.size() >= num_kept_) earlier_ = std::exchange(recent_, {});
  recent_.insert_or_assign(name, key);
}

}  // namespace kvferry
