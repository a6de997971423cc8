#include "controller/engines/block_chain.h"

#include <xxhash.h>

#include <string>

#include "controller/protocol/msgpack_reader.h"

namespace kvferry::controller {
namespace {

std::uint64_t never_zero(std::uint64_t hash) { return hash != 0 ? hash : 1; }

std::uint64_t hash_element(std::uint64_t before, std::string_view bytes) {
  return never_zero(XXH3_64bits_withSeed(bytes.data(), bytes.size(), before));
}

}  // namespace

ShortKey root_block_key(std::uint64_t seed, std::string_view lora_name, std::optional<std::uint64_t> lora_id) {
  if (!lora_name.empty() || !lora_id) return never_zero(XXH3_64bits_withSeed(lora_name.data(), lora_name.size(), seed));
  const std::uint64_t id = *lora_id;
  return never_zero(XXH3_64bits_withSeed(&id, sizeof id, ~seed));
}

ShortKey next_block_key(ShortKey parent, std::span<const std::uint32_t> tokens, std::uint64_t extras) {
  // The seed contains the parent's key, so blocks with equal tokens after different parents have unrelated keys.
  return never_zero(XXH3_64bits_withSeed(tokens.data(), tokens.size_bytes(), parent ^ extras));
}

ExtraKeys::ExtraKeys(std::string_view msgpack, std::string_view lora_name) : left_(msgpack), lora_name_(lora_name) {
  MsgpackReader reader(left_);
  if (!reader.read_array(num_left_)) num_left_ = 0;
  left_ = left_.substr(left_.size() - reader.num_left());
}

std::uint64_t ExtraKeys::next() {
  if (num_left_ == 0) return 0;
  --num_left_;
  MsgpackReader reader(left_);
  std::uint64_t extras = 0;
  std::uint32_t num_elements = 0;
  if (reader.next_is_nil()) {
    reader.skip();
  } else if (reader.read_array(num_elements)) {
    while (num_elements-- > 0) {
      const std::string_view before = left_.substr(left_.size() - reader.num_left());
      MsgpackReader as_text = reader;
      std::string_view text;
      const bool is_text = as_text.read_string(text);
      if (!reader.skip()) break;
      if (is_text && text == lora_name_) continue;
      extras = is_text ? hash_element(extras, text)
                       : hash_element(~extras, before.substr(0, before.size() - reader.num_left()));
    }
  } else {
    const std::string_view before = left_;
    reader.skip();
    extras = hash_element(1, before.substr(0, before.size() - reader.num_left()));
  }
  left_ = left_.substr(left_.size() - reader.num_left());
  return extras;
}

std::uint64_t salt_extras(std::string_view cache_salt) { return cache_salt.empty() ? 0 : hash_element(0, cache_salt); }

}  // namespace kvferry::controller
