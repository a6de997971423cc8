// Two nodes, a prefill and a decode engine, with a simulated network and directory between their scheduler cores. All
// that goes over the network is late, and where the options say so lost, doubled or reordered; nodes die and come back
// empty; the directory goes away. Single-threaded, on a manual clock, all from one seed.
#pragma once

#include <array>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "sim_options.h"

namespace kvferry::sim {

struct NetworkOptions {
  TimeNs max_delay = 20 * kMillisecond;
  double loses = 0;           // a message
  double doubles = 0;         // a message
  double damages_pull = 0;    // a chunk on its way
  double restarts = 0;        // of a node, per step
  double directory_dies = 0;  // or comes back, per step
};
NetworkOptions draw_network(Dice& dice, bool with_faults);

class World {
 public:
  static constexpr std::size_t kPrefill = 0, kDecode = 1;

  World(const SimOptions& options, const NetworkOptions& network, Dice& dice);

  MiniEngine& engine(std::size_t node) { return *nodes_[node].engine; }
  TimeNs now() const { return clock_.now(); }
  /// Time passes, messages arrive, both engines step, and what can go wrong may.
  void step();
  /// Every deadline passes while the network is quiet. Throws Broken unless both nodes are idle then.
  void settle();
  void add(std::size_t node, const RequestSpec& spec);
  /// Where a decode node finds the prompt of a prefill's finished request.
  HandoffSource source(const std::string& prefill_id, std::uint32_t num_tokens) const;
  std::uint64_t num_restarts() const { return num_restarts_; }

 private:
  struct Node {
    std::unique_ptr<MiniEngine> engine;
    EngineId engine_id;
    std::string endpoint;
    std::uint64_t incarnation = 0;
    TimeNs last_word = 0;  // what a node tells the directory arrives in order
    std::map<ChunkKey, ChunkMeta> listed;
    std::map<std::string, RequestSpec> specs;
    CoreCounters counters;
  };
  void start(std::size_t node);
  void restart(std::size_t node);
  void order(std::size_t node);
  void deliver();
  void at(TimeNs when, std::function<void()> what) { events_.emplace(when, std::move(what)); }
  /// Sends to node `to`: late, lost or doubled; who is dead or restarted gets it as whoever it is by then.
  void send(std::function<void()> what);
  /// As send(), for a reply that only the asking process can get.
  void reply(std::size_t to, std::function<void()> what);
  TimeNs delay() { return dice_.between(0, static_cast<std::uint32_t>(network_.max_delay / 1000)) * TimeNs{1000}; }

  void carry_out(std::size_t node);
  void query(std::size_t node, const DirectoryQuery& query);
  void lease(std::size_t node, const LeaseWanted& wanted);
  void pull(std::size_t node, const PullWanted& wanted);
  std::vector<HolderOffer> offers(std::size_t asker, const DirectoryQuery& query) const;

  SimOptions options_;
  NetworkOptions network_;
  Dice& dice_;
  ManualClock clock_;
  StampBook book_;
  std::array<Node, 2> nodes_;
  std::multimap<TimeNs, std::function<void()>> events_;
  bool directory_up_ = true;
  std::uint64_t num_restarts_ = 0;
};

}  // namespace kvferry::sim
