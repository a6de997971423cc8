// A digest of the keys that a node holds in one tier. Two sides that applied the same changes have equal digests.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>

#include "controller/api/tier.h"
#include "transport/base/wire.h"

namespace kvferry::controller {

/// Does not depend on the order of changes. Keys are hashes, so different sets have equal digests with a probability of
/// 2^-64.
struct TierDigest {
  std::uint64_t num_keys = 0;
  std::uint64_t xor_of_keys = 0;  // XOR of the keys' first eight bytes

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
