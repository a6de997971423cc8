// A node alone, or prefill and decode nodes with a simulated network and directory between their scheduler cores. All
// that goes over the network is late, and where the options say so lost, doubled, reordered or damaged; nodes die and
// come back empty; links are cut, nodes slow; the directory goes away, tells old news, and somebody sends garbage.
// Single-threaded, on a manual clock, all from one seed.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "connector/runtime/links/shapes.h"
#include "handoffs.h"
#include "sim_options.h"
#include "sim_push.h"
#include "tests/manual_clock.h"

namespace kvferry::sim {

class World {
 public:
  World(const SimOptions& options, Dice& dice);

  std::size_t num_nodes() const { return nodes_.size(); }
  bool is_prefill(std::size_t node) const { return node < options_.num_prefill; }
  MiniEngine& engine(std::size_t node) { return *nodes_[node].engine; }
  TimeNs now() const { return clock_.now(); }
  /// Time passes, messages arrive, all engines step, and what can go wrong may.
  void step();
  /// From now on nothing goes wrong any more; what is broken is mended.
  void calm_down();
  /// Every deadline passes while the network is quiet. Throws Broken unless all nodes are idle then.
  void settle();
  void add(std::size_t node, const RequestSpec& spec);
  void abort(std::size_t node, const std::string& id);
  /// Requests that were added and have not ended, those of dead nodes included.
  std::size_t num_unfinished() const;
  /// How a request ended; nullopt: not yet.
  std::optional<End> end_of(std::size_t node, const std::string& id) const;
  /// What a finished request's engine was told of it; nullptr where the node has died since.
  const FinishedRequest* finished(std::size_t node, const std::string& id) const;
  /// Where a decode node finds the prompt of a prefill's finished request.
  HandoffSource source(std::size_t node, const std::string& prefill_id, std::uint32_t num_tokens) const;
  /// Where a prefill pushes to.
  std::string push_target(std::size_t node) const { return nodes_[node].endpoint; }
  const Mishaps& mishaps() const { return mishaps_; }
  /// A prompt that is handed over now; `asked`: when its prefill began.
  Handoff handoff(std::size_t from, std::size_t to, const RequestSpec& spec, TimeNs asked) const;
  /// What happened so far.
  Tally tally() const;

 private:
  struct PullUnderWay {
    StartPull wanted;
    std::uint32_t ranks_left = 0;
    bool has_failed = false;  // a rank got nothing
  };
  /// One rank's share of a pull: what came of each chunk so far, and whether all of it did.
  struct RankPull {
    std::vector<std::vector<Stamp>> bytes;
    std::vector<std::uint32_t> runs_here;
  };
  struct Node {
    std::unique_ptr<MiniEngine> engine;
    EngineId engine_id;
    std::string endpoint;
    std::uint64_t incarnation = 0;
    bool is_up = false;
    TimeNs back_at = 0;
    TimeNs slow_until = 0;
    TimeNs last_word = 0;                                 // what a node tells the directory arrives in order
    std::map<ChunkKey, ChunkMeta> listed, listed_before;  // by the directory; some time ago
    std::map<std::string, RequestSpec> specs;             // not ended
    std::map<std::string, End> ended;
    std::map<ChunkKey, std::string> first_asked;  // the endpoint that was asked first for a chunk
    std::map<std::uint64_t, PullUnderWay> pulls;  // not answered by all ranks
    NodePushes pushes;
    std::uint64_t last_fetch = 0;  // of a directory query or lease request
    std::string last_endpoint;
    std::map<std::uint64_t, std::vector<ChunkKey>> asked;  // by fetch, what a lease was wanted for
    std::set<std::uint64_t> forged_answers;                // by fetch, perhaps one that is asked later
    std::uint64_t pool_full = 0;                           // the core's counter when it was last looked at
    std::uint64_t num_load_lines = 0;
    // As NodeLinks has it.
    std::vector<RankEndpoint> ranks;
    std::unique_ptr<RunChecksums> run_checksums;
    std::map<std::uint64_t, std::function<void(LeaseAnswer)>> answers;  // what to do with those that it hands out
    std::map<std::string, ShardMap> maps;                               // by endpoint
  };
  /// A lease that a node wants of another one.
  struct Question {
    std::size_t asker = 0;
    std::uint64_t incarnation = 0;  // of the asker
    std::vector<ChunkKey> keys;
    bool is_answered = false;
  };
  struct GivenLease {
    std::uint64_t incarnation = 0;  // of the holder
    TimeNs deadline = 0;
    bool is_released = false;
  };

  // sim_world.cpp
  void start(std::size_t node);
  void crash(std::size_t node);
  void trouble();
  void trouble_node(std::size_t node);
  void order(std::size_t node);
  void deliver();
  void step_node(std::size_t node, double steps);
  Exit draw_exit();
  std::size_t other(std::size_t node) { return (node + dice_.between(1, num_nodes() - 1)) % num_nodes(); }

  // sim_network.cpp
  void at(TimeNs when, std::function<void()> what) { events_.emplace(when, std::move(what)); }
  bool is_cut(std::size_t a, std::size_t b) const;
  bool is_blocked(std::size_t a, std::size_t b) const;
  TimeNs delay(std::size_t a, std::size_t b);
  /// Sends over the link of two nodes: late, lost or doubled. kDirectory is nobody's link.
  void send(std::size_t from, std::size_t to, std::function<void()> what);
  /// As send(), for what only this life of node `to` can get.
  void send_to_life(std::size_t from, std::size_t to, std::function<void()> what);
  void carry_out(std::size_t node);
  void list(std::size_t node, std::function<void(Node&)> word);
  void query(std::size_t node, const QueryDirectory& query);
  void lease(std::size_t node, const RequestLease& wanted);
  void answer_lease(std::size_t to, RequestLease wanted, std::shared_ptr<Question> question, TimeNs deadline);
  void hash_runs(std::size_t node, const RunChecksums::RankOrder& order);
  void tell_hashed(std::size_t node);
  void release(std::size_t node, const ReleaseLease& released);
  void pull(std::size_t node, const StartPull& wanted);
  /// nullopt: it did not come, or not as it should.
  std::optional<std::vector<Stamp>> read_run(std::size_t node, std::size_t holder, std::uint32_t rank,
                                             const ShardRun* run, const StartPull& wanted, std::size_t item,
                                             std::uint64_t checksum);
  void pull_ended(std::size_t node, std::uint32_t rank, const StartPull& wanted, const ShardMap& map,
                  const RankPull& here);
  void check_pulls(std::size_t node) const;

  // sim_mishaps.cpp
  void note_suspicion(std::size_t node, const std::string& log_line);
  void note_full_pool(std::size_t node);
  void note_forged_answer(std::size_t node, std::uint64_t fetch);
  /// Returns true if an engine's own save writes into the slot.
  static bool is_save(const ChunkPool::Slot& slot) {
    return slot.state == ChunkPool::State::kWriting && slot.writer.starts_with("save of ");
  }
  std::shared_ptr<Question> new_question(std::size_t asker, const std::vector<ChunkKey>& keys);
  void send_about(const Question& question, std::size_t from, std::size_t to, std::function<void()> what);
  ChunkKey key_in(std::size_t node, std::uint32_t slot) const {
    return nodes_[node].engine->core().pool().slot(slot).meta.key;
  }
  /// lasts: how long the chunk can't be had.
  void to_chunk(Mishaps::Kind kind, std::size_t node, const ChunkKey& chunk, TimeNs lasts = 0) {
    mishaps_.to_chunks(kind, node, {&chunk, 1}, now(), now() + lasts);
  }
  std::vector<HolderOffer> offers(std::size_t asker, const QueryDirectory& query);
  std::optional<std::size_t> node_at(const std::string& endpoint) const;

  // sim_push.cpp
  void carry_out_push(std::size_t node, const Action& action);
  std::vector<Shard> shards_of(std::size_t node) const;
  void push_offer(std::size_t node, const OfferPush& offered);
  void push_grant(std::size_t node, const GrantOrder& order);
  void push_answer(std::size_t node, const NodePushes::PendingGrant& lending);
  void push_saved(std::size_t node, std::uint32_t rank, NodePushes::Key key, ChunkRef chunk, NodePushes::Saved saved);
  void push_advance(std::size_t node, NodePushes::Key key);
  bool push_write(std::size_t node, std::uint32_t rank, NodePushes::Key key);
  void push_ended(std::size_t node, std::uint32_t rank, NodePushes::Key key, bool ok);
  void push_revoke(std::size_t node, const Revocation& reclaim);

  // sim_garbage.cpp
  void garbage(std::size_t node);
  void forge_push(std::size_t node);
  void settle_forged(std::size_t node, const PushReply& reply);
  std::vector<HolderOffer> garbage_offers();
  LeaseReply garbage_reply();
  ChunkKey some_key(std::size_t node);
  std::uint32_t some_number();
  TimeNs some_time();

  static constexpr TimeNs kLongestStep = 20 * kMillisecond;    // of step()
  static constexpr TimeNs kSavePatience = 200 * kMillisecond;  // of a holder with its saves
  static constexpr TimeNs kPatience = 600 * kMillisecond;      // of a holder with its workers that hash
  static constexpr std::size_t kDirectory = ~std::size_t{0};
  // The numbers of leases in answers of nodes that were not asked: those that some_number() draws, from here on.
  static constexpr std::uint64_t kForgedLease = 1'000'000'000'000'000;

  SimOptions options_;
  NetworkOptions network_;
  Dice& dice_;
  ManualClock clock_;
  StampBook book_;
  std::vector<Node> nodes_;
  std::multimap<TimeNs, std::function<void()>> events_;
  std::map<std::pair<std::size_t, std::size_t>, TimeNs> cut_until_, blocked_until_, last_on_link_;
  std::map<std::pair<std::size_t, std::uint64_t>, GivenLease> leases_;  // by holder and number
  std::size_t stepping_ = kDirectory;                                   // the node whose engine is being called
  bool directory_up_ = true;
  std::set<ChunkKey> forged_;                                // keys under which chunks of other lengths were offered
  std::set<std::pair<std::size_t, std::size_t>> suspected_;  // who asks nothing of whom
  Mishaps mishaps_;
  Tally tally_;
};

}  // namespace kvferry::sim
