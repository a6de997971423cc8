// Decides from the seed and from a transfer's number alone what the soak test does, so that a run can be replayed.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "transport/transport.h"

namespace kvferry::soak {

constexpr std::uint64_t kBytesMax = std::uint64_t{1} << 20;  // limit on the bytes of one transfer
constexpr std::uint64_t kSlotBytes = kBytesMax + (4 << 10);  // includes room for gaps between the ranges
constexpr std::uint32_t kRangesMax = 200;

/// An event at a peer before a transfer is submitted.
enum class Event : std::uint8_t { kNone, kDisconnect, kKill, kQuit, kStop };

struct Plan {
  Event event = Event::kNone;
  bool disconnects_late = false;  // the id of a lost peer is given up only after its last completion

  std::uint32_t peer = 0;
  Direction direction = Direction::kPull;
  Priority priority = Priority::kNormal;
  std::vector<CopyRange> ranges;  // offsets count from the start of the transfer's slot
  std::uint64_t extent = 0;       // all ranges end before this offset, on both sides
  std::uint64_t paint_seed = 0;
  bool is_verified = false;
  std::string notification;
  std::uint32_t num_feeds = 0;  // 0: the transfer is not fed
  bool has_checksums = false;
  bool is_damaged = false;  // one of the checksums is wrong
  bool is_granted = false;
  int cancel_after = -1;  // cancel after this many further transfers; -1: never
  // revoke after this many further transfers, perhaps while this one runs; -1: after its completion
  int revoke_after = -1;
  bool is_bad = false;  // a range ends outside of its region, so the transfer must be refused
};

/// `restart_every`: mean number of transfers between two restarts of the second peer. `without`: the features to leave
/// out, from "feeds", "checksums", "grants", "restarts", "stops", "disconnects", "cancels".
Plan make_plan(std::uint64_t seed, std::uint64_t number, std::uint64_t restart_every,
               const std::set<std::string>& without);

}  // namespace kvferry::soak
