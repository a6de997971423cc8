// Numbers a node's Publish and Evict messages, and stores them to send lost ones again.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>

#include "controller/protocol/values.h"
#include "controller/protocol/wire.h"

namespace kvferry::controller {

/// Stores the newest messages for sending again, and digests of the keys that are published and not evicted. Pure: no
/// I/O and no clock. Threads: one at a time.
class Publisher {
 public:
  /// Sends one message. If the message is lost, the controller sees a gap in the numbers and requests the missing
  /// messages or a snapshot.
  using Send = std::function<void(std::string_view bytes)>;

  /// `resend_bytes_max`: bound on the sum of the stored messages' sizes.
  Publisher(Incarnation incarnation, std::size_t resend_bytes_max, Send send)
      : incarnation_(incarnation), resend_bytes_max_(resend_bytes_max), send_(std::move(send)) {}

  /// Publishes chunks. Splits long lists into several messages.
  void publish(std::span<const ChunkEntry> chunks, Tier tier = Tier::kHost);
  /// Removes the keys from all tiers.
  void evict(std::span<const ChunkKey> keys);

  /// Begins a snapshot. When the snapshot ends, it replaces everything that was published before its beginning.
  void begin_snapshot();
  void end_snapshot();

  enum class Answer {
    kOnItsWay,       // nothing was sent: a snapshot, which replaces the missing messages, was begun already
    kSentAgain,      // the missing messages were sent again
    kSnapshotBegun,  // a snapshot was begun: the caller must publish everything, then call end_snapshot()
  };
  Answer answer(const wire::SnapshotWanted& wanted);

  std::uint64_t next_sequence() const { return next_sequence_; }
  const TierDigests& digests() const { return digests_; }
  std::size_t num_kept() const { return kept_.size(); }

  void set_kept_below(std::uint64_t sequence) { kept_below_ = std::max(kept_below_, sequence); }
  std::uint64_t kept_below() const { return kept_below_; }

 private:
  template <class T>
  void send(const T& message);

  Incarnation incarnation_;
  std::size_t resend_bytes_max_;
  Send send_;
  std::uint64_t next_sequence_ = 0;
  std::optional<std::uint64_t> snapshot_begun_at_;
  std::deque<std::string> kept_;  // newest messages, without a gap; none older than the beginning of the last snapshot
  std::size_t kept_bytes_ = 0;
  std::uint64_t kept_below_ = 0;
  // [published key] one bit for each tier that holds the key's chunk
  std::unordered_map<ChunkKey, std::uint8_t> tiers_of_;
  TierDigests digests_;
};

}  // namespace kvferry::controller
