// Keys of our own for engines' blocks: a chain of 64-bit hashes, XXH3 of a block's tokens seeded with the block before.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "controller/index/key_log.h"

namespace kvferry::controller {

/// The key before a prompt's first block. `seed`: of the index; unknown to whoever chooses tokens.
ShortKey root_block_key(std::uint64_t seed, std::string_view lora_name, std::optional<std::uint64_t> lora_id);

/// Never 0. `extras`: a hash of what else went into the block; 0: nothing.
ShortKey next_block_key(ShortKey parent, std::span<const std::uint32_t> tokens, std::uint64_t extras);

/// The elements of one block's extra keys less the adapter's name, which the root has; 0: none are left.
class ExtraKeys {
 public:
  /// `msgpack`: an array of nil or an array for each block, or empty. `lora_name` must outlive this.
  ExtraKeys(std::string_view msgpack, std::string_view lora_name);
  /// Of the next block.
  std::uint64_t next();

 private:
  std::string_view left_;
  std::uint32_t num_left_ = 0;
  std::string_view lora_name_;
};

/// What a request's cache salt makes of its first block's extras; 0: an empty salt.
std::uint64_t salt_extras(std::string_view cache_salt);

}  // namespace kvferry::controller
