// Short functions to make nodes, keys and chunks for tests.
#pragma once

#include <string>
#include <vector>

#include "controller/api/client.h"

namespace kvferry::controller {

inline NodeInfo node_info(const std::string& engine_id, std::uint64_t incarnation = 1,
                          const std::string& name_space = "", const std::string& fingerprint = "model=a") {
  return {EngineId{engine_id}, Incarnation{incarnation}, "kv_both", "tcp://10.0.0.1:1", name_space, fingerprint};
}

/// Returns the same key for the same number. The keys are as random as real ones.
inline ChunkKey key_of(std::uint32_t number) { return root_key("test", std::to_string(number)); }

inline std::vector<ChunkKey> keys_of(std::uint32_t from, std::uint32_t to) {
  std::vector<ChunkKey> keys;
  for (std::uint32_t i = from; i < to; ++i) keys.push_back(key_of(i));
  return keys;
}

inline std::vector<ChunkEntry> full_chunks(std::uint32_t from, std::uint32_t to) {
  std::vector<ChunkEntry> chunks;
  for (const ChunkKey& key : keys_of(from, to)) chunks.push_back({key, 256, false, {}});
  return chunks;
}

inline ChunkEntry tail_chunk(std::uint32_t number, std::uint32_t group, std::uint32_t num_tokens = 100) {
  return {key_of(number), num_tokens, true, key_of(group)};
}

}  // namespace kvferry::controller
