// What a node holds in one tier, in short: two sides that saw the same changes have the same digest.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>

#include "controller/api/tier.h"
#include "transport/base/wire.h"

namespace kvferry::controller {

/// In whatever order the changes came. Keys are hashes, so that sets that differ have the same digest by a chance of
/// 2^-64.
struct TierDigest {
  std::uint64_t num_keys = 0;
  std::uint64_t xor_of_keys = 0;  // of the first eight bytes of each

  template <class Key>
  void add(const Key& key) {
    ++num_keys;
    xor_of_keys ^= first_bytes_of(key);
  }
  template <class Key>
  void remove(const Key& key) {
    --num_keys;
    xor_of_keys ^= first_bytes_of(key);
  }
  bool operator==(const TierDigest&) const = default;
  KVFERRY_FIELDS(num_keys, xor_of_keys);

 private:
  template <class Key>
  static std::uint64_t first_bytes_of(const Key& key) {
    std::uint64_t first_bytes;
    std::memcpy(&first_bytes, &key, sizeof first_bytes);
    return first_bytes;
  }
};
using TierDigests = std::array<TierDigest, kNumTiers>;

}  // namespace kvferry::controller
