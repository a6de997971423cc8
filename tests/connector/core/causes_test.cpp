// Tests that the scheduler core names the cause of everything that is computed again: a table injects each cause.
#include <gmock/gmock.h>

#include <set>
#include <tuple>

#include "core_bench.h"

namespace kvferry::sim {
namespace {

using ::testing::FieldsAre;
using ::testing::HasSubstr;

constexpr const char* kPrefill = "tcp://prefill:1";

class Causes : public CoreBench {
 protected:
  Causes() : CoreBench(sizes(8, 4, 16)) {}

  /// Begins anew with another configuration.
  void restart(const CoreConfig& config) {
    core_.emplace(config);
    core_->set_directory_up(false);
  }
  std::vector<LifeEvent> events(const std::string& id, LifeKind kind) const {
    std::vector<LifeEvent> found;
    for (const RequestLife& life : core_->recorder().find(id, now_))
      for (const LifeEvent& event : life.events)
        if (event.what() == kind) found.push_back(event);
    return found;
  }
  /// Admits the request, and returns the event of this admission.
  LifeEvent admit(const std::string& id, const BlockTable& table = {blocks(1, 8)}) {
    const Answer answer = lookup(id);
    EXPECT_FALSE(answer.pending);
    core_->allocated(RequestId{id}, answer.num_external, table, now_);
    return events(id, LifeKind::kAdmitted).back();
  }
  /// Adds a request whose prompt has no holder that the controller knows.
  void add_without_holder(const std::string& id, std::uint32_t num_tokens) {
    core_->set_directory_up(true);
    add(id, num_tokens);
    core_->directory_answered(take<QueryDirectory>().back().fetch, {}, now_);
  }
  /// Adds a request of 24 tokens whose prompt the node kPrefill has.
  void add_handed_over(const std::string& id, const HandoffSource& source = {kPrefill, "p-1.secret", 24}) {
    NewRequest added = request(id, 24);
    added.source = source;
    core_->add_request(added, now_);
  }
  void answer_lease(const LeaseReply& reply) {
    core_->lease_answered(take<RequestLease>().at(0).fetch, kPrefill, reply, now_);
  }
  /// Answers the lease for a handed-over request with all its chunks, and returns the pull that follows.
  std::uint64_t grant() {
    const RequestLease lease = take<RequestLease>().at(0);
    LeaseReply reply{1, "", {}};
    for (std::uint32_t i = 0; i < lease.request.keys.size(); ++i) reply.chunks.push_back({i, {i, 1}, 8, {1}});
    core_->lease_answered(lease.fetch, kPrefill, reply, now_);
    return take<StartPull>().at(0).pull;
  }
  LifeEvent failed_pull(ErrorCode code) {
    add_handed_over("r");
    const std::uint64_t pull = grant();
    core_->pull_done(pull, 0, {false, false, false}, now_ += 5 * kMillisecond, {},
                     {code, "its words", "tcp", 800, 1, 2, 3});
    const LifeEvent pulled = events("r", LifeKind::kPulled).at(0);
    EXPECT_EQ(pulled.failed, 3u);
    EXPECT_EQ(pulled.path.view(), "tcp");
    EXPECT_EQ(pulled.limit_mb_per_s, 800u);
    EXPECT_EQ(pulled.duration, 5 * kMillisecond);
    EXPECT_THAT(std::tuple(pulled.post, pulled.wire, pulled.unpack), FieldsAre(1, 2, 3));
    const LifeEvent event = admit("r");
    EXPECT_EQ(event.note.view(), "its words");
    return event;
  }
  /// Admits a preempted request; the controller knows no holder.
  LifeEvent come_back(const std::string& id) {
    if (lookup(id).pending) core_->directory_answered(take<QueryDirectory>().back().fetch, {}, now_);
    return admit(id);
  }
  /// Computes 24 tokens of the request, and preempts it.
  void run_and_preempt(const std::string& id) {
    core_->set_directory_up(true);
    add(id, 24);
    compute(id, 24, blocks(1, 6));
    build({{}, {RequestId{id}}});
  }
  void evict_all() {
    for (const ChunkMeta& chunk : core_->snapshot()) core_->evict_ordered(std::span(&chunk.key, 1));
  }
  /// Loads 16 tokens of which 8 arrive; `is_damaged`: the chunk with the others has a wrong checksum.
  LifeEvent half_a_load(bool is_damaged) {
    cache(16);
    add("r", 24);
    EXPECT_EQ(admit("r").loaded, 16u);
    const StepPlan plan =
        core_->build_step({{{RequestId{"r"}, 16, 8, BlockTable{blocks(1, 6)}}}, {}}, now_ += kMillisecond);
    WorkerReport report;
    report.step = plan.step;
    report.loads.push_back({"r", plan.loads.at(0).attempt, 8, {}});
    if (is_damaged) report.loads[0].corrupt.push_back(plan.loads[0].items.at(1).chunk);
    core_->worker_report(report, now_ += kMillisecond);
    const LifeEvent event = events("r", LifeKind::kLoaded).at(0);
    EXPECT_EQ(event.expected, 16u);
    EXPECT_EQ(event.loaded, 8u);
    EXPECT_EQ(event.chunks, 1u);
    EXPECT_EQ(event.duration, 2 * kMillisecond);
    return event;
  }

  // ---- the rows of the table: each one injects a cause, and returns the event that names it ----
  LifeEvent no_node_holds_it() {
    add_without_holder("r", 24);
    return admit("r");
  }
  LifeEvent only_the_rest_is_missing() {
    cache(16);
    add_without_holder("r", 20);
    return admit("r");
  }
  LifeEvent chunks_of_a_preempted_request_are_evicted() {
    run_and_preempt("r");
    evict_all();
    const LifeEvent event = come_back("r");
    EXPECT_EQ(event.expected, 23u);
    EXPECT_EQ(events("r", LifeKind::kPreempted).size(), 1u);
    return event;
  }
  LifeEvent chunks_are_evicted_while_the_request_runs() {
    core_->set_directory_up(true);
    add("r", 24);
    compute("r", 24, blocks(1, 6));
    evict_all();
    build({{}, {RequestId{"r"}}});
    return come_back("r");
  }
  LifeEvent the_holder_has_evicted_them() {
    add_handed_over("r");
    answer_lease({});
    return admit("r");
  }
  LifeEvent the_controller_is_not_reached() {
    add("r", 24);
    return admit("r");
  }
  LifeEvent the_controller_is_late() {
    core_->set_directory_up(true);
    add("r", 24);
    core_->tick(now_ += kSecond);
    return admit("r");
  }
  LifeEvent the_holder_does_not_answer() {
    add_handed_over("r");
    core_->tick(now_ += kSecond);
    const LifeEvent event = admit("r");
    EXPECT_EQ(event.peer.view(), kPrefill);
    EXPECT_EQ(event.expected, 24u);
    return event;
  }
  LifeEvent the_link_is_lost() { return failed_pull(ErrorCode::kPeerLost); }
  LifeEvent the_pull_is_cancelled_at_its_deadline() { return failed_pull(ErrorCode::kCancelled); }
  LifeEvent the_transport_stays_full() { return failed_pull(ErrorCode::kTimeout); }
  LifeEvent the_pull_has_no_end() {
    add_handed_over("r");
    grant();
    EXPECT_TRUE(lookup("r").pending);
    now_ += 6 * kSecond;
    const LifeEvent event = admit("r");
    EXPECT_EQ(event.peer.view(), kPrefill);
    return event;
  }
  LifeEvent another_writers_chunks_are_late() {
    core_->set_directory_up(true);
    cache(8);
    take<QueryDirectory>();
    add_without_holder("writer", 24);
    EXPECT_EQ(admit("writer").loaded, 8u);
    core_->build_step({{{RequestId{"writer"}, 8, 16, BlockTable{blocks(1, 6)}}}, {}}, now_);  // not reported
    add_without_holder("r", 24);
    EXPECT_TRUE(lookup("r").pending);
    now_ += 6 * kSecond;
    const LifeEvent event = admit("r");
    EXPECT_EQ(events("r", LifeKind::kWaits).size(), 1u);
    EXPECT_EQ(events("r", LifeKind::kAnswered).size(), 1u);
    return event;
  }
  LifeEvent a_chunk_is_damaged_on_the_way() { return failed_pull(ErrorCode::kCorrupt); }
  LifeEvent a_chunk_is_damaged_in_the_pool() { return half_a_load(true); }
  LifeEvent the_holder_refuses() {
    add_handed_over("r");
    answer_lease({0, "the two nodes serve different models", {}});
    const LifeEvent event = admit("r");
    EXPECT_EQ(event.note.view(), "the two nodes serve different models");
    return event;
  }
  LifeEvent the_holders_transport_refuses() { return failed_pull(ErrorCode::kRefused); }
  LifeEvent the_transfer_fails() { return failed_pull(ErrorCode::kInternal); }
  LifeEvent the_hand_off_is_of_another_fingerprint() {
    add_handed_over("r", {"", "the two nodes serve different models: weights_epoch '0' here, '1' there", 24});
    EXPECT_TRUE(take<RequestLease>().empty());
    const LifeEvent event = admit("r");
    EXPECT_THAT(std::string(event.note.view()), HasSubstr("weights_epoch"));
    EXPECT_EQ(event.expected, 24u);
    return event;
  }
  LifeEvent the_holder_is_suspect() {
    the_holder_does_not_answer();
    add_handed_over("next");
    return admit("next");
  }
  LifeEvent the_pool_has_no_free_slot() {
    restart(sizes(8, 4, 1));
    run_and_preempt("r");
    const LifeEvent event = come_back("r");
    EXPECT_EQ(event.loaded, 8u);
    return event;
  }
  LifeEvent the_request_is_not_shared() {
    NewRequest alone = request("r", 24);
    alone.cacheable = false;
    core_->add_request(alone, now_);
    return admit("r");
  }
  LifeEvent the_engine_has_no_blocks_for_the_load() {
    CoreConfig config = sizes(8, 4, 16);
    config.runs_ahead = true;
    restart(config);
    cache(16);
    add("r", 24);
    EXPECT_EQ(lookup("r").num_external, 16u);
    build();  // the engine had no blocks for the load, and nothing runs that would free some
    EXPECT_TRUE(lookup("r").pending);
    build();
    return admit("r");
  }
  LifeEvent the_window_before_the_hits_end_is_missing() {
    CoreConfig config = sizes(8, 4, 16);
    config.groups = {{4}, {4, 6}};
    restart(config);
    core_->set_directory_up(true);
    add("r", 20);
    core_->directory_answered(take<QueryDirectory>().at(0).fetch, {{kPrefill, 2, {}}}, now_);
    const RequestLease lease = take<RequestLease>().at(0);
    // A hit of 16 tokens needs the window's layers from token 8 on; the second chunk has them from token 12 on.
    core_->lease_answered(lease.fetch, kPrefill, {7, "", {{0, {0, 1}, 8, {5}}, {1, {1, 1}, 8, {5}, 4}}}, now_);
    core_->pull_done(take<StartPull>().at(0).pull, 0, {true, true}, now_);
    const LifeEvent event = admit("r", {blocks(1, 5), blocks(101, 5)});
    EXPECT_EQ(event.loaded, 8u);
    return event;
  }
  LifeEvent the_pool_is_cleared() {
    run_and_preempt("r");
    core_->reset_cache();
    return come_back("r");
  }
  LifeEvent the_engine_does_not_ask() {
    add("r", 24);
    core_->allocated(RequestId{"r"}, 0, {blocks(1, 8)}, now_);
    return events("r", LifeKind::kAdmitted).at(0);
  }
  LifeEvent the_client_hangs_up() {
    add("r", 24);
    compute("r", 24, blocks(1, 6));
    core_->finished(RequestId{"r"}, 24, {blocks(1, 6)}, true, now_);
    return events("r", LifeKind::kFinished).at(0);
  }
  LifeEvent a_load_fails() { return half_a_load(false); }

 public:
  struct Row {
    LifeEvent (Causes::*inject)();
    Cause cause;
  };
  static const std::vector<Row>& rows() {
    static const std::vector<Row> kRows = {
        {&Causes::no_node_holds_it, Cause::kNoHolder},
        {&Causes::only_the_rest_is_missing, Cause::kTooShort},
        {&Causes::chunks_of_a_preempted_request_are_evicted, Cause::kEvicted},
        {&Causes::chunks_are_evicted_while_the_request_runs, Cause::kEvicted},
        {&Causes::the_holder_has_evicted_them, Cause::kEvictedThere},
        {&Causes::the_controller_is_not_reached, Cause::kNoController},
        {&Causes::the_controller_is_late, Cause::kControllerLate},
        {&Causes::the_holder_does_not_answer, Cause::kNoAnswer},
        {&Causes::the_link_is_lost, Cause::kLinkLost},
        {&Causes::the_pull_is_cancelled_at_its_deadline, Cause::kTooSlow},
        {&Causes::the_transport_stays_full, Cause::kTooSlow},
        {&Causes::the_pull_has_no_end, Cause::kTooSlow},
        {&Causes::another_writers_chunks_are_late, Cause::kNotInTime},
        {&Causes::a_chunk_is_damaged_on_the_way, Cause::kDamaged},
        {&Causes::a_chunk_is_damaged_in_the_pool, Cause::kDamaged},
        {&Causes::the_holder_refuses, Cause::kRefused},
        {&Causes::the_holders_transport_refuses, Cause::kRefused},
        {&Causes::the_transfer_fails, Cause::kFailed},
        {&Causes::the_hand_off_is_of_another_fingerprint, Cause::kHandoffUnusable},
        {&Causes::the_holder_is_suspect, Cause::kSuspect},
        {&Causes::the_pool_has_no_free_slot, Cause::kPoolFull},
        {&Causes::the_request_is_not_shared, Cause::kNotShared},
        {&Causes::the_engine_has_no_blocks_for_the_load, Cause::kNoBlocks},
        {&Causes::the_window_before_the_hits_end_is_missing, Cause::kWindow},
        {&Causes::the_pool_is_cleared, Cause::kReset},
        {&Causes::the_engine_does_not_ask, Cause::kNotAsked},
        {&Causes::the_client_hangs_up, Cause::kAborted},
        {&Causes::a_load_fails, Cause::kLoadFailed},
    };
    return kRows;
  }
};

class CauseTable : public Causes, public ::testing::WithParamInterface<std::size_t> {};

TEST_P(CauseTable, NamesWhatWasInjected) {
  const Row& row = rows()[GetParam()];
  const LifeEvent event = (this->*row.inject)();
  EXPECT_EQ(text_of(event.why()), text_of(row.cause));
}

INSTANTIATE_TEST_SUITE_P(All, CauseTable, ::testing::Range(std::size_t{0}, Causes::rows().size()));

TEST_F(Causes, EachOneIsInTheTable) {
  std::set<Cause> injected;
  for (const Row& row : rows()) injected.insert(row.cause);
  for (int cause = 1; cause <= static_cast<int>(Cause::kLoadFailed); ++cause)
    EXPECT_TRUE(injected.contains(static_cast<Cause>(cause))) << text_of(static_cast<Cause>(cause));
}

TEST_F(Causes, AGoodPullLeavesNothingToExplain) {
  add_handed_over("r");
  core_->pull_done(grant(), 0, {true, true, true}, now_);
  const LifeEvent event = admit("r");
  EXPECT_EQ(event.why(), Cause::kNone);
  EXPECT_EQ(event.loaded, 23u);
  EXPECT_EQ(events("r", LifeKind::kPulled).at(0).chunks, 3u);
  EXPECT_EQ(events("r", LifeKind::kArrived).at(0).note.view(), "p-1") << "the rest of the name is secret";
}

TEST_F(Causes, APullCountsAChunkOnlyIfEveryRankHasIt) {
  CoreConfig config = sizes(8, 4, 16);
  config.num_ranks = 2;
  config.chunk_bytes = 80;
  restart(config);
  add_handed_over("r");
  const RequestLease lease = take<RequestLease>().at(0);
  LeaseReply reply{1, "", {}};
  for (std::uint32_t i = 0; i < lease.request.keys.size(); ++i) reply.chunks.push_back({i, {i, 1}, 8, {1, 1}});
  core_->lease_answered(lease.fetch, kPrefill, reply, now_);
  const std::uint64_t pull = take<StartPull>().at(0).pull;
  core_->pull_done(pull, 0, {false, true, true}, now_, {}, {ErrorCode::kTimeout});
  core_->pull_done(pull, 1, {true, false, true}, now_);
  const LifeEvent pulled = events("r", LifeKind::kPulled).at(0);
  EXPECT_THAT(std::tuple(pulled.failed, pulled.chunks, pulled.tokens, pulled.bytes), FieldsAre(2, 1, 8, 80));
}

TEST_F(Causes, ARequestThatTriesWithoutEndRecordsEachCauseOnce) {
  add("r", 24);
  for (int i = 0; i < 100; ++i) {
    (void)lookup("r");
    now_ += kSecond;
    build();
  }
  EXPECT_EQ(events("r", LifeKind::kFetchFailed).size(), 1u);
}

TEST_F(Causes, AWaitThatTheClockMadeUpIsUnknown) {
  constexpr std::int64_t kNow = 1'800'000'000'000, kHour = 3'600'000;
  EXPECT_EQ(wait_since(kNow - 1, kNow), kMillisecond);
  EXPECT_EQ(wait_since(kNow - kHour, kNow), kWaitMax);
  for (const std::int64_t arrived : {kNow - kHour - 1, kNow + 1, kNow, std::int64_t{0}, INT64_MIN, INT64_MAX})
    EXPECT_EQ(wait_since(arrived, kNow), 0) << arrived;
}

TEST_F(Causes, TheWaitAndTheTraceOfARequestAreRecorded) {
  NewRequest made = request("r", 24);
  made.waited = kSecond;
  made.trace = "0af7651916cd43dd8448eb211c80319c";
  core_->add_request(made, now_);
  EXPECT_EQ(events("r", LifeKind::kArrived).at(0).duration, kSecond);
  EXPECT_EQ(core_->recorder().find_trace(made.trace, now_).size(), 1u);
}

TEST_F(Causes, TheEndOfComputingIsRecordedOnceAndTheEndWithWhatIsKept) {
  NewRequest made = request("p", 24);
  made.handoff = true;
  core_->add_request(made, now_);
  compute("p", 24, blocks(1, 7));
  for (std::uint32_t n = 24; n < 27; ++n) {
    core_->update_tokens(RequestId{"p"}, n, std::vector<std::int32_t>{7});
    build({{{RequestId{"p"}, n, 1, std::nullopt}}, {}});
  }
  EXPECT_EQ(events("p", LifeKind::kComputed).size(), 1u);
  core_->finished(RequestId{"p"}, 27, {blocks(1, 7)}, false, now_);
  EXPECT_EQ(events("p", LifeKind::kFinished).at(0).expected, 24u);
}

}  // namespace
}  // namespace kvferry::sim
