// Values that messages and the directory share: ids of nodes, the role of a Publish, digests, holders that a lookup
// found.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <span>

#include "controller/api/client.h"
#include "transport/base/clock.h"
#include "transport/base/ids.h"
#include "transport/base/wire.h"

namespace kvferry::controller {

/// One registered (namespace, engine id, incarnation). Never reused, so late messages of an expired node or a fenced
/// incarnation match no node.
using NodeId = StrongId<struct NodeIdTag, std::uint64_t>;

/// A snapshot lists everything that a node holds.
enum class SnapshotMark {
  kNone,
  kReplaces,  // voids at once all that the node held before
  kBegins,    // what the node held before counts until kEnds; what it publishes from here on also counts afterwards
  kEnds,      // last message of the snapshot
};

/// A digest of the keys that a node holds in one tier. Two sides that applied the same changes have equal digests.
/// The order of changes does not matter. Keys are hashes, so different sets have equal digests with a probability of
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

/// A Holder without copies, and what the directory ranks it by.
struct HolderView {
  const NodeInfo* info = nullptr;
  std::uint32_t num_full_chunks = 0;
  std::span<const ChunkEntry> tails;
  Tier tier = Tier::kHost;
  bool confirmed = true;
  TimeNs heard_at = 0;
  bool is_leaving = false;
};

}  // namespace kvferry::controller
