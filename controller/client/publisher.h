// What a node told the controller, and may have to tell again: the client's memory, without its socket.
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

#include "controller/protocol/tier_digest.h"
#include "controller/protocol/wire.h"

namespace kvferry::controller {

/// Numbers each message, keeps the newest ones for sending again, and knows the digest of what it published.
/// Pure: no I/O and no clock. Threads: one at a time.
class Publisher {
 public:
  /// Called within the calls below; what does not arrive is a gap that the controller asks about.
  using Send = std::function<void(std::string_view bytes)>;

  /// `resend_bytes_max`: of messages that are kept.
  Publisher(Incarnation incarnation, std::size_t resend_bytes_max, Send send)
      : incarnation_(incarnation), resend_bytes_max_(resend_bytes_max), send_(std::move(send)) {}

  /// Long lists become several messages.
  void publish(std::span<const ChunkEntry> chunks, Tier tier = Tier::kHost);
  /// From all tiers.
  void evict(std::span<const ChunkKey> keys);

  /// Everything published before counts no more once the snapshot that begins here has ended.
  void begin_snapshot();
  void end_snapshot();

  enum class Answer {
    kOnItsWay,       // the controller asked before it saw what makes good its loss
    kSentAgain,      // what it misses
    kSnapshotBegun,  // too old for that: everything has to be published, and the snapshot ended
  };
  Answer answer(const wire::SnapshotWanted& wanted);

  std::uint64_t next_sequence() const { return next_sequence_; }  // of the next message
  const TierDigests& digests() const { return digests_; }         // of what was published up to here
  std::size_t num_kept() const { return kept_.size(); }

  /// The controller's word: messages below outlive its process.
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
  std::deque<std::string> kept_;  // the newest messages, without a gap; none from before the last snapshot's begin
  std::size_t kept_bytes_ = 0;
  std::uint64_t kept_below_ = 0;
  std::unordered_map<ChunkKey, std::uint8_t> tiers_of_;  // of each key published: a bit for each
  TierDigests digests_;
};

}  // namespace kvferry::controller
