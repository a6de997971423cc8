// A single node, or prefill and decode nodes with a simulated network and directory between their scheduler cores.
// Everything that goes over the network is late and, depending on the options, lost, doubled, reordered or damaged.
// Nodes die and return empty, links are cut, nodes are slow, the directory fails or gives outdated answers, and garbage
// is sent. The world has one thread and a manual clock, and one seed decides everything.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "connector/runtime/links/frame_leases.h"
#include "connector/runtime/links/shapes.h"
#include "handoffs.h"
#include "sim_options.h"
#include "sim_parts.h"
#include "sim_push.h"
#include "tests/manual_clock.h"

namespace kvferry::sim {

class World {
 public:
  World(const SimOptions& options, Dice& dice);

  std::size_t num_nodes() const { return nodes_.size(); }
  bool is_prefill(std::size_t node) const { return node < options_.num_prefill; }
  MiniEngine& engine(std::size_t node) { return *nodes_[node].engine; }
  /// Returns how often the node's weights were updated; a node that is down starts with the first ones.
  std::uint32_t weights(std::size_t node) const { return nodes_[node].is_up ? nodes_[node].engine->weights() : 0; }
  TimeNs now() const { return clock_.now(); }
  /// Lets time pass, delivers messages, runs a step of every engine, and causes mishaps.
  void step();
  /// From now on there are no more mishaps, and broken things are repaired.
  void calm_down();
  /// Lets every deadline pass without network traffic. Throws Broken unless all nodes are idle then.
  void settle();
  void add(std::size_t node, const RequestSpec& spec);
  void abort(std::size_t node, const std::string& id);
  /// Returns the number of requests that were added and have not ended, including those of dead nodes.
  std::size_t num_unfinished() const;
  /// Returns how a request ended; nullopt if it has not ended yet.
  std::optional<End> end_of(std::size_t node, const std::string& id) const;
  /// Returns what the engine of a finished request was told about it; nullptr if the node has died since.
  const FinishedRequest* finished(std::size_t node, const std::string& id) const;
  /// Returns where a decode node finds the prompt of a prefill's finished request.
  HandoffSource source(std::size_t node, const FinishedRequest& prefilled) const;
  /// Returns the endpoint to which a prefill pushes.
  std::string push_target(std::size_t node) const { return nodes_[node].endpoint; }
  const Mishaps& mishaps() const { return mishaps_; }
  /// Returns the handoff of a prompt that is handed over now. `asked`: the time at which its prefill began.
  Handoff handoff(std::size_t from, std::size_t to, const RequestSpec& spec, TimeNs asked) const;
  /// Returns how often everything has happened so far.
  Tally tally() const;

 private:
  /// One rank's part of a pull: the bytes of each chunk so far, and the number of runs that have arrived.
  struct RankPull {
    StartPull wanted;  // as this rank carries it out
    ShardMap map;
    bool is_misled = false;  // see Holder
    std::vector<std::vector<Stamp>> bytes;
    std::vector<std::uint32_t> runs_here;
    std::uint32_t num_past_frames = 0;  // number of chunks that the holder has in a frame, but that are read from slots
    std::size_t parts_left = 1;         // the chunks that do not grow are one part, each growing chunk is another
    /// What a rank has pulled of a chunk that its holder still packs; the same members as in Puller.
    struct Growth {
      ChunkKey key;
      bool is_open = false;
      bool ok = true;
      std::uint32_t layers = 0;     // number of layers that were asked for
      std::size_t num_pending = 1;  // transfers, and one more while the chunk grows
      std::optional<std::uint64_t> checksum = {};
      bool is_tainted = false;  // bytes were damaged, or were read too early or too late
      bool is_whole = false;    // true once the whole chunk has its checksum
    };
    std::map<std::size_t, Growth> growths;  // [item]
    std::uint64_t holder_life = 0;          // incarnation of the holder when the pull began
    TimeNs began = 0, grown_at = 0;         // times of the order and of the last message about growing chunks
    TimeNs last_word = 0;                   // keeps these messages in order
  };
  using RankPullPtr = std::shared_ptr<RankPull>;
  struct PullUnderWay {
    StartPull wanted;
    std::uint32_t ranks_left = 0;
    bool has_failed = false;  // a rank could not read its part
    std::vector<RankPullPtr> ranks;
  };
  /// How a node reads from another one.
  struct Holder {
    ShardMap map;
    bool is_misled = false;  // one of the two told wrong parts, so that runs may have other checksums
  };
  struct Node {
    std::unique_ptr<MiniEngine> engine;
    EngineId engine_id;
    std::string endpoint;
    std::string member;  // each node is a member of its own
    std::uint64_t incarnation = 0;
    bool is_up = false;
    TimeNs back_at = 0;
    TimeNs slow_until = 0;
    TimeNs last_word = 0;                                 // keeps the node's reports to the directory in order
    std::map<ChunkKey, ChunkMeta> listed, listed_before;  // the chunks that the directory lists now, and some time ago
    std::map<std::string, RequestSpec> specs;             // requests that have not ended
    std::map<std::string, End> ended;
    std::map<ChunkKey, std::string> first_asked;  // the endpoint that first got a request for the chunk
    std::map<std::uint64_t, PullUnderWay> pulls;  // pulls that not all ranks have answered
    NodePushes pushes;
    std::uint64_t last_fetch = 0;  // number of the last directory query or lease request
    std::string last_endpoint;
    std::map<std::uint64_t, std::vector<ChunkKey>> asked;  // by fetch, the chunks for which a lease was requested
    // numbers of fetches with a forged answer, which may come before the fetch itself
    std::set<std::uint64_t> forged_answers;
    std::set<std::pair<std::uint32_t, ChunkRef>> told_early;  // (rank, chunk) of which layers were told too early
    std::map<ChunkRef, TimeNs> growth_began;                  // times at which saves began to grow
    std::map<ChunkRef, std::size_t> brought_by;  // the node that a chunk was pulled from or pushed by, whatever it says
    std::uint64_t pool_full = 0;                 // value of the core's counter when it was last read
    std::uint64_t num_load_lines = 0;
    // The same members as in NodeLinks.
    std::vector<RankEndpoint> ranks;
    std::unique_ptr<RunChecksums> run_checksums;
    FrameLeases frame_leases;
    // what to do with the answers that run_checksums and frame_leases return
    std::map<std::uint64_t, std::function<void(LeaseAnswer)>> answers;
    std::map<std::string, Holder> holders;  // keyed by endpoint
  };
  /// A lease that one node requests from another.
  struct Question {
    std::size_t asker = 0;
    std::uint64_t incarnation = 0;  // incarnation of the asker
    std::vector<ChunkKey> keys;
    bool is_answered = false;
    std::optional<Lie> lie;  // what the request told wrong of the asker's parts
  };
  struct GivenLease {
    std::uint64_t incarnation = 0;  // incarnation of the holder
    TimeNs deadline = 0;
    bool is_released = false;
  };

  // sim_world.cpp
  void start(std::size_t node);
  void deliver();
  void step_node(std::size_t node, double steps);
  Exit draw_exit();
  std::size_t other(std::size_t node) { return (node + dice_.between(1, num_nodes() - 1)) % num_nodes(); }

  // sim_trouble.cpp
  void crash(std::size_t node);
  void trouble();
  void trouble_node(std::size_t node);
  void order(std::size_t node);
  void evict(std::size_t node, std::span<const ChunkKey> keys);
  void excuse_unpublished(std::size_t node, const ChunkPool::Slot& slot);
  void excuse_all_unpublished(std::size_t node);

  // sim_network.cpp and sim_leases.cpp
  void at(TimeNs when, std::function<void()> what) { events_.emplace(when, std::move(what)); }
  bool is_cut(std::size_t a, std::size_t b) const;
  bool is_blocked(std::size_t a, std::size_t b) const;
  TimeNs delay(std::size_t a, std::size_t b);
  /// Sends a message over the link of two nodes, which may delay, lose or double it. kDirectory is not a node, so its
  /// link has no faults.
  void send(std::size_t from, std::size_t to, std::function<void()> what);
  /// Does the same as send() for a message that only this life of node `to` may get.
  void send_to_life(std::size_t from, std::size_t to, std::function<void()> what);
  void carry_out(std::size_t node);
  void list(std::size_t node, std::function<void(Node&)> word);
  void query(std::size_t node, const QueryDirectory& query);
  void lease(std::size_t node, const RequestLease& wanted);
  void answer_lease(std::size_t to, RequestLease wanted, std::shared_ptr<Question> question, TimeNs deadline);
  void hash_runs(std::size_t node, const RunChecksums::RankOrder& order);
  void tell_hashed(std::size_t node);
  /// Returns the lie that a node tells another one of another shape about its parts, if it does.
  std::optional<Lie> lie(const Question& question, std::size_t from, std::size_t to, std::vector<ShardParts>& parts);
  void send_answer(std::size_t from, const RequestLease& wanted, const std::shared_ptr<Question>& question,
                   LeaseAnswer answer);
  void take_answer(const RequestLease& wanted, Question& question, LeaseAnswer answer, const std::optional<Lie>& told);
  void pin_frames(std::size_t node, std::uint64_t asker, LeaseAnswer answer);
  void tell_pinned(std::size_t node);
  void release(std::size_t node, const ReleaseLease& released);

  // sim_pull.cpp
  void pull(std::size_t node, const StartPull& wanted);
  /// Returns nullopt if the bytes did not arrive, or arrived wrong.
  std::optional<std::vector<Stamp>> read_run(std::size_t node, std::size_t holder, std::uint32_t rank,
                                             const ShardRun* run, const StartPull& wanted, std::size_t item,
                                             std::uint64_t checksum);
  bool check_read(std::size_t node, std::size_t holder, const Worker& worker, const StartPull& wanted, ChunkRef remote,
                  std::uint32_t frame);
  void part_ended(std::size_t node, std::uint32_t rank, RankPull& here);
  void pull_ended(std::size_t node, std::uint32_t rank, const RankPull& here);
  void parts_pulled(std::size_t node, std::uint32_t rank, std::uint32_t slot, const RankPull& here);
  std::uint32_t pull_past_frames(std::size_t node, std::uint32_t rank, StartPull& wanted);
  void write_slot(std::size_t node, std::uint32_t rank, ChunkRef chunk, std::optional<SaveDone> save = {});
  void check_pulls(std::size_t node) const;
  void check_purged(std::size_t node);

  // sim_layers.cpp
  void grow_saves(std::size_t node);
  void grow_save(std::size_t node, std::uint32_t rank, const SaveItem& save);
  bool has_growing(std::size_t node) const;
  void begin_growth(std::size_t node, std::uint32_t rank, RankPull& here, std::size_t item);
  void grow_pull(std::size_t node, const GrowPull& told);
  void grow(std::size_t node, std::uint32_t rank, const RankPullPtr& here, const GrowPull& told);
  void watch_growth(std::size_t node, std::uint32_t rank, const RankPullPtr& here);
  void pull_layers(std::size_t node, std::uint32_t rank, const RankPullPtr& here, std::size_t item, std::uint32_t first,
                   std::uint32_t end);
  std::optional<std::vector<Stamp>> read_layers(std::size_t node, std::size_t holder, std::uint32_t rank,
                                                RankPull& here, std::size_t item, std::uint32_t first,
                                                std::uint32_t end);
  void close_growth(std::size_t node, std::uint32_t rank, const RankPullPtr& here, std::size_t item, bool ok);
  void growth_piece_ended(std::size_t node, std::uint32_t rank, const RankPullPtr& here, std::size_t item);
  void growth_ended(std::size_t node, std::uint32_t rank, RankPull& here, std::size_t item);
  /// Schedules what happens only if the node is not killed before.
  void at_in_life(TimeNs when, std::size_t node, std::function<void()> what) {
    at(when, [this, node, life = nodes_[node].incarnation, what = std::move(what)] {
      if (nodes_[node].incarnation == life) what();
    });
  }

  // sim_mishaps.cpp
  void note_suspicion(std::size_t node, const std::string& paused_node);
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
  /// lasts: how long the chunk is unavailable.
  void to_chunk(Mishaps::Kind kind, std::size_t node, const ChunkKey& chunk, TimeNs lasts = 0) {
    mishaps_.to_chunks(kind, node, {&chunk, 1}, now(), now() + lasts);
  }
  std::vector<HolderOffer> offers(std::size_t asker, const QueryDirectory& query);
  std::optional<std::size_t> node_at(const std::string& endpoint) const;
  /// Returns the member whose node is at the endpoint, or "" if there is no node.
  std::string member_at(const std::string& endpoint) const {
    const std::optional<std::size_t> node = node_at(endpoint);
    return node ? nodes_[*node].member : "";
  }

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

  static constexpr TimeNs kLongestStep = 20 * kMillisecond;    // longest step of the world
  static constexpr TimeNs kSavePatience = 200 * kMillisecond;  // how long a holder waits for its saves
  static constexpr TimeNs kPatience = 600 * kMillisecond;      // how long a holder waits for its workers to hash chunks
  static constexpr TimeNs kGrowthPause = 1 * kSecond;  // how long a reader waits for the next layers of a growing chunk
  static constexpr TimeNs kFramePatience = 100 * kMillisecond;  // how long it waits for them to pin frames
  static constexpr std::size_t kDirectory = ~std::size_t{0};
  // Leases in answers of nodes that did not get the request have numbers from this one on.
  static constexpr std::uint64_t kForgedLease = 1'000'000'000'000'000;

  SimOptions options_;
  NetworkOptions network_;
  Dice& dice_;
  ManualClock clock_;
  StampBook book_;
  std::vector<Node> nodes_;
  std::multimap<TimeNs, std::function<void()>> events_;
  std::map<std::pair<std::size_t, std::size_t>, TimeNs> cut_until_, blocked_until_, last_on_link_;
  std::map<std::pair<std::size_t, std::uint64_t>, GivenLease> leases_;  // keyed by (holder, number of the lease)
  std::size_t stepping_ = kDirectory;                                   // the node whose engine runs at the moment
  bool directory_up_ = true;
  std::set<ChunkKey> forged_;  // keys under which chunks of other lengths were offered
  // pairs (asker, holder): the asker sends no requests to the holder
  std::set<std::pair<std::size_t, std::size_t>> suspected_;
  Mishaps mishaps_;
  Tally tally_;
};

}  // namespace kvferry::sim
