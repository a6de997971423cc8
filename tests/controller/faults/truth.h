// What every worker holds in truth, now and a while ago, and whether a controller's answer agrees with it.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <vector>

#include "controller/api/client.h"
#include "transport/base/clock.h"

namespace kvferry::faults {

constexpr std::uint32_t kPrefixKeys = 64;

/// Keys of a prefix; a worker holds the first so many of them.
std::vector<ChunkKey> keys_of_prefix(std::uint32_t prefix);

class Truth {
 public:
  Truth(std::uint32_t num_workers, std::uint32_t num_prefixes);

  static std::string name_of(std::uint32_t worker);

  /// From `now` on.
  void set(std::uint32_t worker, std::uint32_t prefix, std::uint32_t depth, TimeNs now);
  /// Its process is gone, and all that it held.
  void die(std::uint32_t worker, TimeNs now);
  void live(std::uint32_t worker, std::uint64_t incarnation);
  bool is_alive(std::uint32_t worker) const { return workers_[worker].incarnation != 0; }
  std::uint32_t depth(std::uint32_t worker, std::uint32_t prefix) const;
  std::uint32_t num_prefixes() const { return num_prefixes_; }

  /// In words what is wrong with the answer to a lookup of all keys of `prefix` that was asked at `asked` and came at
  /// `now`: somebody credited with more than it had at any time since `bound` before it was asked. Empty: nothing.
  std::string stale(std::uint32_t prefix, const std::vector<controller::Holder>& holders, TimeNs asked, TimeNs now,
                    TimeNs bound);
  /// Of all answers so far: the longest that somebody was credited with what it had no more when it was asked for.
  TimeNs oldest_credit() const { return oldest_credit_; }
  /// In words what differs between the answer and what is held now. Empty: nothing.
  std::string differs(std::uint32_t prefix, const std::vector<controller::Holder>& holders) const;

 private:
  struct Change {
    TimeNs at;
    std::uint32_t depth;
  };
  struct Worker {
    std::uint64_t incarnation = 0;                // 0: dead
    std::vector<std::deque<Change>> by_prefix{};  // oldest first; the last is now
  };
  std::uint32_t num_prefixes_;
  std::vector<Worker> workers_;
  TimeNs oldest_credit_ = 0;
};

}  // namespace kvferry::faults
