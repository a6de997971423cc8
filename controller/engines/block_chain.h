// The controller's own keys for engines' blocks: XXH3 of a block's tokens, seeded with the key of the previous block
// and a hash of the block's extra keys.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "controller/index/key_log.h"

namespace kvferry::controller {

/// Returns the parent key of a prompt's first block. `seed` must be unknown to clients, which could otherwise construct
/// blocks with equal keys.
ShortKey root_block_key(std::uint64_t seed, std::string_view lora_name, std::optional<std::uint64_t> lora_id);

/// Returns a block's key, never 0. `extras`: hash of the block's extra keys and cache salt (see ExtraKeys and
/// salt_extras()), or 0 if the block has neither.
ShortKey next_block_key(ShortKey parent, std::span<const std::uint32_t> tokens, std::uint64_t extras);

/// Hashes the extra keys of successive blocks (`extra_keys` in vLLM's events), except the LoRA adapter's name, which is
/// part of the root key.
class ExtraKeys {
 public:
  /// `msgpack`: an array that has nil or an array of keys for each block, or an empty string. The memory of both views
  /// must outlive this object.
  ExtraKeys(std::string_view msgpack, std::string_view lora_name);
  /// Returns the hash for the next block, or 0 if the block has no extra keys other than the LoRA adapter's name.
  std::uint64_t next();

 private:
  std::string_view left_;
  std::uint32_t num_left_ = 0;
  std::string_view lora_name_;
};

/// Returns the `extras` of next_block_key() for the first block of a request that has this cache salt and no other
/// extra keys, or 0 if `cache_salt` is empty.
std::uint64_t salt_extras(std::string_view cache_salt);

}  // namespace kvferry::controller
