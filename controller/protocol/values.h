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

/// Identifies a registered node: its namespace, engine id and incarnation. Ids are never reused, so late messages of an
/// expired node or a replaced incarnation match no node.
using NodeId = StrongId<struct NodeIdTag, std::uint64_t>;

/// Role of a Publish in a snapshot, which lists everything that a node holds.
enum class SnapshotMark {
  kNone,
  kReplaces,  // first message of a snapshot; what the node held before is void at once
  kBegins,    // first message of a snapshot; what the node held before is valid until kEnds
  kEnds,      // last message of the snapshot
};

/// A digest of the keys that a node holds in one tier. Equal sets of keys have equal digests, in whatever order the
/// keys were added. Keys are hashes, so different sets of the same size have equal digests with a probability of 2^-64.
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

/// A Holder that refers to the directory's data, and the values by which the directory ranks holders.
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
