// What the soak does, decided by its seed and a transfer's number alone, so that a run can be replayed.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "transport/transport.h"

namespace kvferry::soak {

constexpr std::uint64_t kBytesMax = std::uint64_t{1} << 20;  // of one transfer
constexpr std::uint64_t kSlotBytes = kBytesMax + (4 << 10);  // room for the gaps between its ranges
constexpr std::uint32_t kRangesMax = 200;

/// Happens to a peer before a transfer is submitted.
enum class Event : std::uint8_t { kNone, kDisconnect, kKill, kQuit, kStop };

struct Plan {
  Event event = Event::kNone;
  bool disconnects_late = false;  // a lost peer's id is given up after its last completion, not at once

  std::uint32_t peer = 0;
  Direction direction = Direction::kPull;
  Priority priority = Priority::kNormal;
  std::vector<CopyRange> ranges;  // offsets count from the start of the slot that the transfer gets
  std::uint64_t extent = 0;       // the ranges lie below it, on both sides
  std::uint64_t paint_seed = 0;
  bool is_verified = false;
  std::string notification;
  std::uint32_t num_feeds = 0;  // 0: not fed
  bool has_checksums = false;
  bool is_damaged = false;  // one of its checksums is wrong
  bool is_granted = false;
  int cancel_after = -1;  // this many transfers later; -1: never
  int revoke_after = -1;  // while it may still run; -1: after its completion
  bool is_bad = false;    // reaches beyond its region: must be refused
};

/// `restart_every`: on average so many transfers lie between two restarts of the second peer. `without`: of "feeds",
/// "checksums", "grants", "restarts", "stops", "disconnects", "cancels".
Plan make_plan(std::uint64_t seed, std::uint64_t number, std::uint64_t restart_every,
               const std::set<std::string>& without);

}  // namespace kvferry::soak
