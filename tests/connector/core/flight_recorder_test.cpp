// Tests the flight recorder's ring, and that the scheduler core names the cause of everything that it computes again.
#include "connector/core/flight_recorder.h"

#include "core_bench.h"

namespace kvferry::sim {
namespace {

TEST(FlightRecorder, TellsARequestsEventsInTheirOrderWithTheirAge) {
  FlightRecorder recorder(8, 4);
  const std::uint64_t a = recorder.begin("cmpl-a-0-11112222"), b = recorder.begin("b");
  recorder.add(a, LifeKind::kArrived, 10).tokens = 7;
  recorder.add(b, LifeKind::kArrived, 11);
  recorder.add(a, LifeKind::kFinished, 15);
  const std::vector<RequestLife> lives = recorder.find("a", 20);
  ASSERT_EQ(lives.size(), 1u);
  EXPECT_EQ(lives[0].request, "cmpl-a-0-11112222");
  EXPECT_FALSE(lives[0].is_cut);
  ASSERT_EQ(lives[0].events.size(), 2u);
  EXPECT_EQ(lives[0].events[0].tokens, 7u);
  EXPECT_EQ(lives[0].events[0].at, 10);
  EXPECT_EQ(lives[0].events[1].at, 5);
}

TEST(FlightRecorder, FindsIdsByPartsBetweenHyphensOnly) {
  FlightRecorder recorder(8, 4);
  recorder.begin("cmpl-6f1a-42-0-11112222");
  for (const char* found : {"6f1a-42", "cmpl-6f1a-42-0-11112222", "6f1a", "11112222"})
    EXPECT_EQ(recorder.find(found, 0).size(), 1u) << found;
  for (const char* other : {"", "6f1", "f1a-42", "6f1a-42-", "7", "cmpl-6f1a-42-0-111122223"})
    EXPECT_EQ(recorder.find(other, 0).size(), 0u) << other;
}

TEST(FlightRecorder, OverwritesTheOldestAndSaysSo) {
  FlightRecorder recorder(4, 2);
  const std::uint64_t a = recorder.begin("a");
  for (int i = 0; i < 3; ++i) recorder.add(a, LifeKind::kPulled, i);
  const std::uint64_t b = recorder.begin("b");
  for (int i = 0; i < 3; ++i) recorder.add(b, LifeKind::kPulled, i);
  ASSERT_EQ(recorder.find("a", 0).size(), 1u);
  EXPECT_TRUE(recorder.find("a", 0)[0].is_cut);
  EXPECT_EQ(recorder.find("a", 0)[0].events.size(), 1u);
  EXPECT_FALSE(recorder.find("b", 0)[0].is_cut);
  recorder.begin("c");  // takes the place of `a`, whose later events belong to no request
  recorder.add(a, LifeKind::kPushed, 9);
  EXPECT_TRUE(recorder.find("a", 0).empty());
  EXPECT_TRUE(recorder.find("c", 0)[0].events.empty());
}

TEST(FlightRecorder, BoundsWhatItTells) {
  FlightRecorder recorder(1000, 100);
  for (int i = 0; i < 50; ++i) recorder.begin("same-" + std::to_string(i));
  const std::uint64_t last = recorder.begin("same-x");
  for (int i = 0; i < 500; ++i) recorder.add(last, LifeKind::kPulled, i).note = std::string(500, 'n');
  const std::vector<RequestLife> lives = recorder.find("same", 0);
  ASSERT_EQ(lives.size(), FlightRecorder::kLivesMax);
  EXPECT_EQ(lives.back().request, "same-x");
  EXPECT_TRUE(lives.back().is_cut);
  EXPECT_EQ(lives.back().events.size(), FlightRecorder::kEventsMax);
  EXPECT_EQ(lives.back().events[0].note.view(), std::string(103, 'n'));
}

TEST(FlightRecorder, EveryCauseHasATextAndAnUnknownOneItsNumber) {
  for (int cause = 0; cause <= static_cast<int>(Cause::kLoadFailed); ++cause)
    EXPECT_EQ(text_of(static_cast<Cause>(cause)).find("unknown"), std::string::npos) << cause;
  EXPECT_EQ(text_of(static_cast<Cause>(200)), "unknown cause 200");
}

constexpr const char* kPrefill = "tcp://prefill:1";

class Causes : public CoreBench {
 protected:
  explicit Causes(std::uint32_t num_slots = 16) : CoreBench(sizes(8, 4, num_slots)) {}

  std::vector<LifeEvent> events(const std::string& id, LifeKind kind) const {
    std::vector<LifeEvent> found;
    for (const RequestLife& life : core_->lives(id, now_))
      for (const LifeEvent& event : life.events)
        if (event.what() == kind) found.push_back(event);
    return found;
  }
  /// Admits the request, and returns the event of this admission.
  LifeEvent admit(const std::string& id) {
    const Answer answer = lookup(id);
    EXPECT_FALSE(answer.pending);
    core_->allocated(RequestId{id}, answer.num_external, {blocks(1, 8)}, now_);
    return events(id, LifeKind::kAdmitted).back();
  }
  /// Adds a request of 24 tokens whose prompt the node kPrefill has.
  void add_handed_over(const std::string& id, const HandoffSource& source = {kPrefill, "p-1.secret", 24}) {
    NewRequest added = request(id, 24);
    added.source = source;
    core_->add_request(added, now_);
  }
  /// Answers the lease for a handed-over request with all its chunks, and returns the pull that follows.
  std::uint64_t grant() {
    const RequestLease lease = take<RequestLease>().at(0);
    LeaseReply reply{1, "", {}};
    for (std::uint32_t i = 0; i < lease.request.keys.size(); ++i) reply.chunks.push_back({i, {i, 1}, 8, {1}});
    core_->lease_answered(lease.fetch, kPrefill, reply, now_);
    return take<StartPull>().at(0).pull;
  }
  /// Admits a preempted request; the controller knows no holder.
  LifeEvent come_back(const std::string& id) {
    if (lookup(id).pending) core_->directory_answered(take<QueryDirectory>().back().fetch, {}, now_);
    return admit(id);
  }
  /// Computes 24 tokens of the request, and preempts it.
  void run_and_preempt(const std::string& id) {
    add(id, 24);
    compute(id, 24, blocks(1, 6));
    build({{}, {RequestId{id}}});
  }
};

TEST_F(Causes, NoNodeHeldIt) {
  core_->set_directory_up(true);
  add("r", 24);
  core_->directory_answered(take<QueryDirectory>().at(0).fetch, {}, now_);
  EXPECT_EQ(admit("r").why(), Cause::kNoHolder);
}

TEST_F(Causes, TheControllerIsNotReachedOrLate) {
  add("a", 24);
  EXPECT_EQ(admit("a").why(), Cause::kNoController);
  core_->set_directory_up(true);
  add("b", 24);
  core_->tick(now_ += kSecond);
  EXPECT_EQ(admit("b").why(), Cause::kControllerLate);
}

TEST_F(Causes, TheHolderDoesNotAnswerAndIsASuspectForTheNextRequest) {
  add_handed_over("a");
  core_->tick(now_ += kSecond);
  const LifeEvent event = admit("a");
  EXPECT_EQ(event.why(), Cause::kNoAnswer);
  EXPECT_EQ(event.peer.view(), kPrefill);
  EXPECT_EQ(event.expected, 24u);
  add_handed_over("b");
  EXPECT_EQ(admit("b").why(), Cause::kSuspect);
}

TEST_F(Causes, TheHolderRefuses) {
  add_handed_over("r");
  const LeaseReply reply{0, "the two nodes serve different models", {}};
  core_->lease_answered(take<RequestLease>().at(0).fetch, kPrefill, reply, now_);
  const LifeEvent event = admit("r");
  EXPECT_EQ(event.why(), Cause::kRefused);
  EXPECT_EQ(event.note.view(), "the two nodes serve different models");
}

TEST_F(Causes, TheHolderHasEvictedTheChunks) {
  add_handed_over("r");
  core_->lease_answered(take<RequestLease>().at(0).fetch, kPrefill, {}, now_);
  EXPECT_EQ(admit("r").why(), Cause::kEvictedThere);
}

TEST_F(Causes, APullEndsBadly) {
  const std::pair<ErrorCode, Cause> kEnds[] = {{ErrorCode::kPeerLost, Cause::kLinkLost},
                                               {ErrorCode::kCancelled, Cause::kTooSlow},
                                               {ErrorCode::kCorrupt, Cause::kDamaged},
                                               {ErrorCode::kRefused, Cause::kRefused},
                                               {ErrorCode::kInternal, Cause::kFailed}};
  for (const auto& [code, cause] : kEnds) {
    const std::string id = "r-" + std::to_string(static_cast<int>(code));
    add_handed_over(id);
    const std::uint64_t pull = grant();
    core_->pull_done(pull, 0, {false, false, false}, now_ += 5 * kMillisecond, {}, {code, "its words", "tcp"});
    const LifeEvent event = admit(id);
    EXPECT_EQ(event.why(), cause);
    EXPECT_EQ(event.note.view(), "its words");
    const LifeEvent pulled = events(id, LifeKind::kPulled).at(0);
    EXPECT_EQ(pulled.failed, 3u);
    EXPECT_EQ(pulled.path.view(), "tcp");
    EXPECT_EQ(pulled.duration, 5 * kMillisecond);
    build();
  }
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

TEST_F(Causes, ChunksOfAnotherWriterAreLate) {
  core_->set_directory_up(true);
  cache(8);
  take<QueryDirectory>();
  add("writer", 24);
  core_->directory_answered(take<QueryDirectory>().at(0).fetch, {}, now_);
  const LifeEvent first = admit("writer");
  EXPECT_EQ(first.loaded, 8u);
  core_->build_step({{{RequestId{"writer"}, 8, 16, BlockTable{blocks(1, 6)}}}, {}}, now_);  // not reported
  add("r", 24);
  core_->directory_answered(take<QueryDirectory>().at(0).fetch, {}, now_);
  EXPECT_TRUE(lookup("r").pending);
  now_ += 6 * kSecond;
  EXPECT_EQ(admit("r").why(), Cause::kNotInTime);
  EXPECT_EQ(events("r", LifeKind::kWaits).size(), 1u);
  EXPECT_EQ(events("r", LifeKind::kAnswered).size(), 1u);
}

TEST_F(Causes, TheHandOffIsNotUsable) {
  add_handed_over("r", {"", "the two nodes serve different models: weights_epoch '0' here, '1' there", 24});
  EXPECT_TRUE(take<RequestLease>().empty());
  const LifeEvent event = admit("r");
  EXPECT_EQ(event.why(), Cause::kHandoffUnusable);
  EXPECT_NE(event.note.view().find("weights_epoch"), std::string::npos);
  EXPECT_EQ(event.expected, 24u);
}

TEST_F(Causes, TheRequestIsNotSharedOrTheEngineDoesNotAsk) {
  NewRequest alone = request("alone", 24);
  alone.cacheable = false;
  core_->add_request(alone, now_);
  EXPECT_EQ(admit("alone").why(), Cause::kNotShared);
  add("silent", 24);
  core_->allocated(RequestId{"silent"}, 0, {blocks(1, 8)}, now_);
  EXPECT_EQ(events("silent", LifeKind::kAdmitted).at(0).why(), Cause::kNotAsked);
}

TEST_F(Causes, APreemptedRequestsChunksAreEvictedOrThePoolIsCleared) {
  core_->set_directory_up(true);
  run_and_preempt("r");
  const std::vector<ChunkMeta> kept = core_->snapshot();
  for (const ChunkMeta& chunk : kept) core_->evict_ordered(std::span(&chunk.key, 1));
  const LifeEvent event = come_back("r");
  EXPECT_EQ(event.why(), Cause::kEvicted);
  EXPECT_EQ(event.expected, 23u);
  EXPECT_EQ(events("r", LifeKind::kPreempted).size(), 1u);
  run_and_preempt("s");
  core_->reset_cache();
  EXPECT_EQ(come_back("s").why(), Cause::kReset);
}

TEST_F(Causes, ChunksThatWereEvictedWhileTheRequestStillRanAreNamedToo) {
  core_->set_directory_up(true);
  add("r", 24);
  compute("r", 24, blocks(1, 6));
  for (const ChunkMeta& chunk : core_->snapshot()) core_->evict_ordered(std::span(&chunk.key, 1));
  build({{}, {RequestId{"r"}}});
  EXPECT_EQ(come_back("r").why(), Cause::kEvicted);
}

TEST_F(Causes, ADamagedChunkInThePool) {
  cache(16);
  add("r", 24);
  EXPECT_EQ(admit("r").loaded, 16u);
  const StepPlan plan =
      core_->build_step({{{RequestId{"r"}, 16, 8, BlockTable{blocks(1, 6)}}}, {}}, now_ += kMillisecond);
  WorkerReport report;
  report.step = plan.step;
  report.loads.push_back({"r", plan.loads.at(0).attempt, 8, {plan.loads[0].items.at(1).chunk}});
  core_->worker_report(report, now_ += kMillisecond);
  const LifeEvent event = events("r", LifeKind::kLoaded).at(0);
  EXPECT_EQ(event.why(), Cause::kDamaged);
  EXPECT_EQ(event.expected, 16u);
  EXPECT_EQ(event.loaded, 8u);
  EXPECT_EQ(event.duration, 2 * kMillisecond);
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

class CausesOfAFullPool : public Causes {
 protected:
  CausesOfAFullPool() : Causes(1) {}
};

TEST_F(CausesOfAFullPool, NoSlotIsFree) {
  core_->set_directory_up(true);
  run_and_preempt("r");
  const LifeEvent event = come_back("r");
  EXPECT_EQ(event.loaded, 8u);
  EXPECT_EQ(event.why(), Cause::kPoolFull);
}

}  // namespace
}  // namespace kvferry::sim
