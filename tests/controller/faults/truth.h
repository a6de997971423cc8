// Records what every worker really holds, now and some time ago, and checks whether a controller's answer agrees with
// it.
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

/// Returns the keys of a prefix. A worker holds the first keys of them, as many as its depth.
std::vector<ChunkKey> keys_of_prefix(std::uint32_t prefix);

class Truth {
 public:
  Truth(std::uint32_t num_workers, std::uint32_t num_prefixes);

  static std::string name_of(std::uint32_t worker);

  /// Sets how many keys of a prefix a worker holds from `now` on.
  void set(std::uint32_t worker, std::uint32_t prefix, std::uint32_t depth, TimeNs now);
  /// Records that the worker's process has died with everything that it held.
  void die(std::uint32_t worker, TimeNs now);
  void live(std::uint32_t worker, std::uint64_t incarnation);
  bool is_alive(std::uint32_t worker) const { return workers_[worker].incarnation != 0; }
  std::uint32_t depth(std::uint32_t worker, std::uint32_t prefix) const;
  std::uint32_t num_prefixes() const { return num_prefixes_; }

  /// Checks the answer to a lookup of all keys of `prefix`, which was sent at `asked` and answered at `now`. Returns in
  /// words if a worker was credited with more keys than it had at any time since `bound` before `asked`. Returns an
  /// empty text if the answer is right.
  std::string stale(std::uint32_t prefix, const std::vector<controller::Holder>& holders, TimeNs asked, TimeNs now,
                    TimeNs bound);
  /// Returns, over all answers so far, the longest time for which a worker was credited with keys that it no longer had
  /// when it was asked.
  TimeNs oldest_credit() const { return oldest_credit_; }
  /// Returns in words the difference between the answer and what the workers hold now; empty if there is none.
  std::string differs(std::uint32_t prefix, const std::vector<controller::Holder>& holders) const;

 private:
  struct Change {
    TimeNs at;
    std::uint32_t depth;
  };
  struct Worker {
    std::uint64_t incarnation = 0;                // 0: the worker is dead
    std::vector<std::deque<Change>> by_prefix{};  // oldest change first; the last one is the current state
  };
  std::uint32_t num_prefixes_;
  std::vector<Worker> workers_;
  TimeNs oldest_credit_ = 0;
};

}  // namespace kvferry::faults
