// Many nodes in one thread: each a real client of the controller with an identity and a load of its own.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "controller/client/client_link.h"
#include "launch/bench/fleet/fleet_load.h"
#include "transport/base/owned_fd.h"

namespace kvferry::bench {

struct FleetLoad {
  std::uint32_t num_nodes = 0;
  std::uint64_t conversations_per_node = 0;
  double stores_per_s = 0, lookups_per_s = 0;  // of a node; it evicts as many as it stores
};

/// What look-ups took since the last time that somebody asked.
struct LookupTimes {
  std::vector<double> us;       // from the call to the event
  std::uint64_t num_wrong = 0;  // did not name the node that holds all of it
  std::uint64_t num_failed = 0;
};

/// Threads: one owner, and one of ZeroMQ's under all clients.
class Fleet {
 public:
  /// `controllers`: endpoints; with several, the nodes prefer them in turns. kUnavailable: no descriptors for so many.
  static Result<std::unique_ptr<Fleet>> make(std::vector<std::string> controllers, const FleetLoad& load);
  Fleet(const Fleet&) = delete;
  Fleet& operator=(const Fleet&) = delete;
  ~Fleet();

  /// A new incarnation of a node; the one before is gone without a goodbye, unless leave() came first.
  Result<void> join(std::uint32_t node);
  void leave(std::uint32_t node);
  /// As when its machine loses power: its connection stays, and nobody answers any more.
  void fall_silent(std::uint32_t node);
  void set_traffic(bool is_on) { has_traffic_ = is_on; }
  /// Nobody counts as registered or told before it says so again.
  void expect_all_again();

  /// Does what is due, then waits for what comes, 1 ms at most.
  void turn();
  TimeNs now() const { return clock_.now(); }

  bool is_up(std::uint32_t node) const;  // registered, and the controller has all that it held
  std::uint32_t num_registered() const;
  std::uint32_t num_up() const;
  LookupTimes take_lookups();
  std::size_t num_waiting() const;  // look-ups without an answer
  /// Look-ups that are older than that when they are answered, or without an answer, since take_lookups().
  std::optional<TimeNs> last_slow(TimeNs older_than) const;
  /// Asks for what only `node` holds. seen_gone(): when the first answer did not name it.
  void probe(std::uint32_t node);
  std::optional<TimeNs> seen_gone(std::uint32_t node) const;
  /// For how long its own timers were more than 5 ms late since the last call: the bench itself is at its limit.
  TimeNs take_lateness();
  const std::string& refusal() const { return refusal_; }  // of the node that was refused last

 private:
  struct Node;
  struct Asked {
    std::uint64_t token = 0;
    TimeNs at = 0;
    std::uint32_t holder = 0;
    bool is_probe = false;
  };

  Fleet(std::vector<std::string> controllers, const FleetLoad& load);
  Result<std::unique_ptr<controller::Client>> make_client(std::uint32_t node);
  void beat(std::uint32_t node, TimeNs now);
  void process(std::uint32_t node);
  void tell_all(Node& node);
  void ask(std::uint32_t asker, std::uint32_t holder, bool is_probe, TimeNs now);
  void answered(Node& node, const controller::LookupReply& reply, TimeNs now);

  SteadyClock clock_;
  std::vector<std::string> controllers_;
  FleetLoad load_;
  std::shared_ptr<controller::ZmqThreads> threads_;
  OwnedFd epoll_;
  std::vector<Node> nodes_;
  std::vector<controller::ChunkEntry> chunks_;  // in hand
  controller::LookupQuery query_;
  std::mt19937_64 random_{1};
  bool has_traffic_ = false;
  TimeNs started_at_;
  std::uint64_t num_ticks_ = 0;  // of 1 ms, that were attended
  std::uint64_t num_late_ticks_ = 0;
  LookupTimes times_;
  std::vector<std::pair<TimeNs, TimeNs>> slow_;  // asked and answered
  std::string refusal_;
};

}  // namespace kvferry::bench
