#include "transport/base/secrets/secret_numbers.h"

#include <algorithm>

#include "transport/base/chunk_key.h"

namespace kvferry {

std::uint64_t SecretNumbers::draw() {
  const ChunkKey digest = root_key(secret_, std::to_string(++num_drawn_));  // the key has 16 bytes of a SHA-256 digest
  return std::max<std::uint64_t>(digest.first_word(), 1);
}

}  // namespace kvferry
