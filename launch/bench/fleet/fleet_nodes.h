// Many nodes in one thread. Each node is a real client of the controller, with its own identity and load.
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
  double stores_per_s = 0, lookups_per_s = 0;  // rates of one node, which evicts as many chunks as it stores
};

/// Results of lookups since the last take_lookups().
struct LookupTimes {
  std::vector<double> us;  // time from the call to the reply, for each answered lookup that was not a probe()
  // Number of replies that did not name the node whose conversation was looked up, although that node was up.
  std::uint64_t num_wrong = 0;
  std::uint64_t num_failed = 0;
};

/// The nodes of the benchmark. Not thread-safe. All clients over ZeroMQ share one ZeroMQ thread.
class Fleet {
 public:
  /// The nodes are spread evenly over `controllers`, the endpoints of the replicas. Throws a Failure kUnavailable if
  /// there are not enough file descriptors for that many nodes.
  Fleet(std::vector<std::string> controllers, const FleetLoad& load);
  Fleet(const Fleet&) = delete;
  Fleet& operator=(const Fleet&) = delete;
  ~Fleet();

  /// Starts a new incarnation of a node. Unless leave() was called, the controller gets no message about the end of
  /// the previous incarnation.
  void join(std::uint32_t node);
  void leave(std::uint32_t node);
  /// Makes a node behave as if its machine had lost power: the node neither sends nor reads, and its connection stays
  /// open.
  void fall_silent(std::uint32_t node);
  void set_traffic(bool is_on) { has_traffic_ = is_on; }
  /// Treats all nodes as down (see is_up()) until they have registered again and the controller has their chunks.
  void expect_all_again();

  /// Does the nodes' work that is due, then waits up to 1 ms for messages and processes them.
  void turn();
  TimeNs now() const { return clock_.now(); }

  /// Returns true if the node is registered and the controller has the node's whole snapshot.
  bool is_up(std::uint32_t node) const;
  std::uint32_t num_registered() const;
  std::uint32_t num_up() const;
  LookupTimes take_lookups();
  std::size_t num_waiting() const;  // Returns the number of lookups that wait for an answer.
  /// Returns the time at which the last slow answer since take_lookups() arrived, nullopt if there was none. An answer
  /// is slow if it took more than 50 ms and at least `older_than`.
  std::optional<TimeNs> last_slow(TimeNs older_than) const;
  /// Makes another node look up a conversation that only `node` holds.
  void probe(std::uint32_t node);
  /// Returns the time of the first answer to probe() since fall_silent() that did not name the node; nullopt if all
  /// answers named the node.
  std::optional<TimeNs> seen_gone(std::uint32_t node) const;
  /// Returns the sum of the delays of turn() since the last take_lateness(), without the first 5 ms of each delay. A
  /// large sum means that this process is overloaded.
  TimeNs take_lateness();
  /// Returns the reason of the controller's last refusal; empty if there was none.
  const std::string& refusal() const { return refusal_; }

 private:
  struct Node;
  struct Asked {
    std::uint64_t token = 0;
    TimeNs at = 0;
    std::uint32_t holder = 0;
    bool is_probe = false;
  };

  std::unique_ptr<controller::Client> make_client(std::uint32_t node);
  void beat(std::uint32_t node, TimeNs now);
  void process(std::uint32_t node);
  void publish_snapshot(Node& node);
  void ask(std::uint32_t asker, std::uint32_t holder, bool is_probe, TimeNs now);
  void answered(Node& node, const controller::LookupReply& reply, TimeNs now);

  SteadyClock clock_;
  std::vector<std::string> controllers_;
  FleetLoad load_;
  std::shared_ptr<net::ZmqContext> zmq_context_;
  OwnedFd epoll_;
  std::vector<Node> nodes_;
  std::vector<controller::ChunkEntry> chunks_;  // scratch space for a snapshot
  controller::LookupQuery query_;
  std::mt19937_64 random_{1};
  bool has_traffic_ = false;
  TimeNs started_at_;
  // Number of milliseconds since started_at_ whose work is done, or was dropped because it was overdue.
  std::uint64_t num_ticks_ = 0;
  std::uint64_t num_late_ticks_ = 0;
  LookupTimes times_;
  std::vector<std::pair<TimeNs, TimeNs>> slow_;  // times at which each slow lookup was sent and answered
  std::string refusal_;
};

}  // namespace kvferry::bench
