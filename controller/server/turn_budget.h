// How much input a listener handles in one turn of the controller's loop, and how much of one peer's input before the
// next peer's. Pure, but for the clock that is handed in.
#pragma once

#include <cstddef>
#include <string>

#include "transport/base/clock.h"

namespace kvferry::controller {

// Limits on one turn of a listener, so that the other listeners and the lease checks come soon. The last message of a
// turn may exceed them.
constexpr std::size_t kTurnMessagesMax = 1024;
constexpr std::size_t kTurnBytesMax = std::size_t{4} << 20;
constexpr TimeNs kTurnTimeMax = 20 * kMillisecond;
// Limits on a peer's share, after which the peer's further messages wait until all other waiting peers had theirs. One
// message may exceed the time by itself, such as a lookup of 65536 keys.
constexpr std::size_t kShareMessagesMax = 64;
constexpr TimeNs kShareTimeMax = 2 * kMillisecond;

/// Counts what a listener handles in the current turn and in the current peer's share of it. Threads: one at a time.
class TurnBudget {
 public:
  /// `clock` must outlive the budget.
  explicit TurnBudget(const Clock& clock) : clock_(clock) {}

  void begin_turn();
  /// Begins the share of the next peer in the same turn.
  void begin_share();
  /// Counts messages that were handled and bytes that were read. Either number may be 0.
  void count(std::size_t num_messages, std::size_t num_bytes);

  /// Returns the last reading of the clock.
  TimeNs now() const { return now_; }
  bool is_turn_over() const {
    return turn_.num_messages >= kTurnMessagesMax || turn_.num_bytes >= kTurnBytesMax ||
           now_ - turn_.begun_at >= kTurnTimeMax;
  }
  bool is_share_over() const {
    return share_.num_messages >= kShareMessagesMax || now_ - share_.begun_at >= kShareTimeMax;
  }
  /// Returns what the current peer's share was used for, e.g. "64 messages in 120 us".
  std::string share_used() const;

 private:
  struct Used {
    TimeNs begun_at = 0;
    std::size_t num_messages = 0;
    std::size_t num_bytes = 0;
  };
  const Clock& clock_;
  TimeNs now_ = 0;  // the last reading of the clock
  Used turn_, share_;
};

}  // namespace kvferry::controller
