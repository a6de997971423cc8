// Tests steps and reports: what is saved in which step, and the effects of failed loads and late reports.
#include <gmock/gmock.h>

#include "core_bench.h"

namespace kvferry::sim {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

class Steps : public CoreBench {
 protected:
  Steps() : Steps(sizes(32, 16, 64)) {}
  explicit Steps(const CoreConfig& config) : CoreBench(config) {}
  const RequestId a_{"a"};
};

TEST_F(Steps, ChunksAreSavedAsTheyFillAndTheRestWhenTheRequestEnds) {
  add("a", 40);
  EXPECT_THAT(saved_blocks(compute("a", 30, blocks(1, 3))), IsEmpty());
  EXPECT_THAT(saved_blocks(build({{{a_, 30, 10, {}}}, {}})), ElementsAre(1, 2));
  core_->update_tokens(a_, 40, std::span(tokens_).subspan(40, 1));
  EXPECT_THAT(saved_blocks(build({{{a_, 40, 1, {}}}, {}})), IsEmpty());
  core_->finished(a_, 41, {blocks(1, 3)}, false, now_);
  const StepPlan after = build();
  ASSERT_THAT(after.saves_before, SizeIs(1));
  EXPECT_THAT(after.saves_before[0].block_ids[0], ElementsAre(3));
  EXPECT_EQ(after.saves_before[0].items[0].num_tokens, 9u);
}

TEST_F(Steps, ARequestThatIsNamedByItsHandleIsSavedTheSame) {
  add("a", 40);
  compute("a", 30, {1});
  const RequestHandle handle = core_->handle_of(a_);
  StepInput step;
  step.running = {{handle, 30, 10}};
  step.block_changes = {{handle, {{2}}, false}};
  EXPECT_THAT(saved_blocks(build(step)), ElementsAre(1, 2));
  core_->update_tokens(a_, 40, std::span(tokens_).subspan(40, 30));
  step.running = {{handle, 40, 30}};
  step.block_changes = {{handle, {{7, 8, 3, 4, 5}}, true}};
  EXPECT_THAT(saved_blocks(build(step)), ElementsAre(3, 4));
}

TEST_F(Steps, AHandleOfARequestThatEndedNamesNoLaterRequest) {
  add("a", 40);
  compute("a", 30, blocks(1, 3));
  const RequestHandle ended = core_->handle_of(a_);
  core_->finished(a_, 30, {blocks(1, 3)}, true, now_);
  add("b", 90);
  compute("b", 30, blocks(4, 6));
  ASSERT_EQ(core_->handle_of(RequestId{"b"}).progress, ended.progress) << "the record is used again";
  StepInput step;
  step.running = {{ended, 30, 60}, {core_->handle_of(RequestId{"unknown"}), 30, 60}};
  step.block_changes = {{ended, {{9}}, true}};
  EXPECT_THAT(saved_blocks(build(step)), IsEmpty());
  step.running = {{core_->handle_of(RequestId{"b"}), 30, 60}};
  step.block_changes.clear();
  EXPECT_THAT(saved_blocks(build(step)), ElementsAre(4, 5, 6, 7));
}

class StepsOfAReader : public Steps {
 protected:
  static CoreConfig config() {
    CoreConfig made = sizes(32, 16, 64);
    made.only_reads = true;
    return made;
  }
  StepsOfAReader() : Steps(config()) {}
};

TEST_F(StepsOfAReader, ANodeThatConvertsWhatItLoadsSavesNeitherFullChunksNorRests) {
  NewRequest added = request("a", 70);
  added.handoff = true;
  added.push_to = "tcp://decode:1";
  core_->add_request(added, now_);
  EXPECT_THAT(take<OfferPush>(), IsEmpty());
  EXPECT_TRUE(compute("a", 70, blocks(1, 5)).empty());
  EXPECT_TRUE(build({{}, {a_}}).empty()) << "a preemption";
  compute("a", 70, blocks(1, 5));
  const FinishedRequest done = core_->finished(a_, 70, {blocks(1, 5)}, false, now_);
  EXPECT_TRUE(done.handoff) << "the other node finds out that there are no chunks";
  EXPECT_TRUE(build().empty());
  EXPECT_EQ(core_->pool().num_writing(), 0u);
}

TEST_F(Steps, AnAbortedRequestSavesNothingMore) {
  add("a", 40);
  compute("a", 40, blocks(1, 3));
  core_->finished(a_, 40, {blocks(1, 3)}, true, now_);
  EXPECT_TRUE(build().empty());
}

TEST_F(Steps, TokensThatTheEngineTookBackAreNotSavedAsIfComputed) {
  add("a", 70);
  compute("a", 70, blocks(1, 5));
  core_->update_tokens(a_, 40, std::span(tokens_).subspan(200, 30));  // replaces the last 30 tokens by others
  const StepPlan plan = build({{}, {a_}});
  ASSERT_THAT(plan.saves_before, SizeIs(1));
  EXPECT_EQ(plan.saves_before[0].items[0].num_tokens, 8u);  // tokens 32 .. 39, and not 40 .. 69
}

TEST_F(Steps, ARejectedDraftsPlaceIsNotSavedAtAPreemption) {
  add("a", 40);
  lookup("a");
  core_->allocated(a_, 0, {blocks(1, 4)}, now_);
  build({{{a_, 0, 40, BlockTable{blocks(1, 4)}}}, {}});
  core_->update_tokens(a_, 40, std::span(tokens_).subspan(40, 1));
  build({{{a_, 40, 2, std::nullopt}}, {}});  // one token and a draft, which is rejected
  core_->update_tokens(a_, 41, std::span(tokens_).subspan(41, 1));
  const StepPlan plan = build({{}, {a_}});
  ASSERT_THAT(plan.saves_before, SizeIs(1));
  // tokens 32 .. 40; the cell of token 41 has the KV of the draft
  EXPECT_EQ(plan.saves_before[0].items[0].num_tokens, 9u);
}

TEST_F(Steps, AFailedLoadIsCountedItsChunkDroppedAndWhatRestsOnItNotPublished) {
  cache(64);
  add("a", 100);
  EXPECT_EQ(lookup("a").num_external, 64u);
  core_->allocated(a_, 64, {blocks(1, 7)}, now_);
  const StepPlan plan = core_->build_step({{{a_, 64, 36, BlockTable{blocks(1, 7)}}}, {}}, now_);
  ASSERT_THAT(plan.loads, SizeIs(1));
  ASSERT_THAT(plan.saves_after, SizeIs(1));
  WorkerReport report = well_done(plan);
  report.loads[0].tokens_loaded = 32;
  report.loads[0].corrupt = {plan.loads[0].items[1].chunk};
  core_->take_actions();
  core_->worker_report(report, now_);
  EXPECT_THAT(take<PublishChunks>(), IsEmpty());
  EXPECT_EQ(core_->counters().load_failures, 1u);
  EXPECT_EQ(core_->counters().loaded_tokens, 32u);
  EXPECT_EQ(core_->pool().num_writing(), 0u);
  EXPECT_EQ(core_->pool().num_pins(), 0u);
  // The request is preempted before it is computed again, so none of its KV is known to be right.
  EXPECT_TRUE(build({{}, {a_}}).empty());
  EXPECT_EQ(lookup("a").num_external, 32u);
  core_->allocated(a_, 32, {blocks(1, 7)}, now_);
  EXPECT_THAT(saved_blocks(build({{{a_, 32, 68, BlockTable{blocks(1, 7)}}}, {}})), ElementsAre(3, 4, 5, 6));
}

TEST_F(Steps, APlanThatIsOutWhenALoadFailsPublishesNothingEither) {
  cache(64);
  add("a", 130);
  lookup("a");
  core_->allocated(a_, 64, {blocks(1, 9)}, now_);
  const StepPlan first = core_->build_step({{{a_, 64, 30, BlockTable{blocks(1, 9)}}}, {}}, now_);
  // asynchronous scheduling: this step is built before the report of the first one
  const StepPlan second = core_->build_step({{{a_, 94, 36, {}}}, {}}, now_);
  ASSERT_THAT(second.saves_after, SizeIs(2));
  WorkerReport failed = well_done(first);
  failed.loads[0].tokens_loaded = 0;
  core_->take_actions();
  core_->worker_report(failed, now_);
  core_->worker_report(well_done(second), now_);
  EXPECT_THAT(take<PublishChunks>(), IsEmpty());
  EXPECT_EQ(core_->pool().num_writing(), 0u);
}

TEST_F(Steps, ALoadIsReportedOnce) {
  cache(32);
  add("a", 40);
  lookup("a");
  core_->allocated(a_, 32, {blocks(1, 3)}, now_);
  const StepPlan plan = build({{{a_, 32, 8, BlockTable{blocks(1, 3)}}}, {}});
  EXPECT_BREAKS(core_->worker_report(well_done(plan), now_), "exactly-once");
}

TEST_F(Steps, ALateLoadIsNotCountedForAnAdmissionThatNeededNone) {
  cache(32);
  add("a", 40);
  const auto admit = [&] {
    const std::uint32_t external = lookup("a").num_external;
    core_->allocated(a_, external, {blocks(1, 3)}, now_);
    return core_->build_step({{{a_, external, 40 - external, BlockTable{blocks(1, 3)}}}, {}}, now_);
  };
  const StepPlan first = admit();
  build({{}, {a_}});
  const StepPlan second = admit();
  WorkerReport failed = well_done(first);
  failed.loads[0].tokens_loaded = 0;  // no chunk is damaged, so the request goes on without the cache
  core_->worker_report(failed, now_);
  build({{}, {a_}});
  EXPECT_THAT(admit().loads, IsEmpty());
  core_->worker_report(well_done(second), now_);
  const FinishedRequest done = core_->finished(a_, 40, {blocks(1, 3)}, true, now_);
  ASSERT_THAT(done.admissions, SizeIs(3));
  EXPECT_GT(done.admissions[1].loaded, 0u);
  EXPECT_EQ(done.admissions[2].attempt, 3u);
  EXPECT_EQ(done.admissions[2].loaded, 0u);
}

TEST_F(Steps, AnIdUsedAgainWhileItsFirstLoadIsUnderWayKeepsTheTwoApart) {
  cache(32);
  const auto admit = [&] {
    add("a", 40);
    lookup("a");
    core_->allocated(a_, 32, {blocks(1, 3)}, now_);
    return core_->build_step({{{a_, 32, 8, BlockTable{blocks(1, 3)}}}, {}}, now_);
  };
  const StepPlan first = admit();
  core_->finished(a_, 40, {blocks(1, 3)}, true, now_);
  const StepPlan second = admit();
  core_->worker_report(well_done(first), now_);
  core_->worker_report(well_done(second), now_);
  EXPECT_EQ(core_->counters().loaded_tokens, 64u);
  EXPECT_EQ(core_->pool().num_pins(), 0u);
  const FinishedRequest done = core_->finished(a_, 40, {blocks(1, 3)}, true, now_);
  ASSERT_THAT(done.admissions, SizeIs(1));
  EXPECT_EQ(done.admissions[0].loaded, 32u);
}

TEST_F(Steps, SaveDecodeCacheOffSavesThePromptAlone) {
  CoreConfig config = sizes(32, 16, 64);
  config.save_decode_cache = false;
  core_.emplace(config);
  core_->set_directory_up(false);
  add("a", 40);
  EXPECT_THAT(saved_blocks(compute("a", 40, blocks(1, 3))), ElementsAre(1, 2));
  core_->update_tokens(a_, 40, std::span(tokens_).subspan(40, 60));
  EXPECT_THAT(saved_blocks(build({{{a_, 40, 59, BlockTable{blocks(1, 7)}}}, {}})), IsEmpty());
  core_->finished(a_, 99, {blocks(1, 7)}, false, now_);
  const StepPlan after = build();
  ASSERT_THAT(after.saves_before, SizeIs(1));
  EXPECT_EQ(after.saves_before[0].items[0].num_tokens, 8u);
}

TEST_F(Steps, MoreTokensThanWereOfferedAreRefused) {
  cache(32);
  add("a", 40);
  lookup("a");
  EXPECT_BREAKS(core_->allocated(a_, 33, {blocks(1, 3)}, now_), "exact-load");
  EXPECT_BREAKS(core_->allocated(a_, 32, {blocks(1, 1)}, now_), "exact-load");
}

TEST_F(Steps, TokensWithoutALookupAreRefused) {
  add("a", 40);
  EXPECT_BREAKS(core_->allocated(a_, 16, {blocks(1, 3)}, now_), "exact-load");
}

TEST_F(Steps, FewerTokensThanWereOfferedAreLoadedExactly) {
  cache(64);
  add("a", 70);
  EXPECT_EQ(lookup("a").num_external, 64u);
  core_->allocated(a_, 48, {blocks(1, 5)}, now_);
  const StepPlan plan = build();
  ASSERT_THAT(plan.loads, SizeIs(1));
  ASSERT_THAT(plan.loads[0].items, SizeIs(2));
  EXPECT_EQ(plan.loads[0].items[1].num_tokens, 16u);
}

TEST_F(Steps, UnknownRequestsAreIgnored) {
  const RequestId unknown{"x"};
  core_->update_tokens(unknown, 0, tokens_);
  EXPECT_EQ(core_->num_tokens(unknown), 0u);
  EXPECT_EQ(lookup("x").num_external, 0u);
  core_->allocated(unknown, 0, {{}}, now_);
  EXPECT_FALSE(core_->finished(unknown, 0, {{}}, false, now_).known);
  EXPECT_TRUE(build({{{unknown, 0, 1, {}}}, {unknown}}).empty());
  core_->lease_released(77);
  core_->directory_answered(77, {}, now_);
}

TEST_F(Steps, AResetDropsTheChunksAndTellsTheDirectory) {
  cache(64);
  core_->take_actions();
  core_->reset_cache();
  const std::vector<AnnounceEvictions> evicted = take<AnnounceEvictions>();
  ASSERT_THAT(evicted, SizeIs(1));
  EXPECT_THAT(evicted[0].keys, SizeIs(2));
  EXPECT_THAT(core_->snapshot(), IsEmpty());
}

TEST_F(Steps, ARequestWithOtherExtrasSharesNothing) {
  cache(64);
  NewRequest other = request("a", 70);
  other.extras = "lora";
  core_->add_request(other, now_);
  EXPECT_EQ(lookup("a").num_external, 0u);
}

class TwoRanks : public Steps {
 protected:
  TwoRanks()
      : Steps([] {
          CoreConfig config = sizes(32, 16, 64);
          config.num_ranks = 2;
          return config;
        }()) {}
};

TEST_F(TwoRanks, AChunkIsOfferedWhenTheSlowestRankWroteItAndCountsWhatTheWorstOneLoaded) {
  add("a", 40);
  lookup("a");
  core_->allocated(a_, 0, {blocks(1, 3)}, now_);
  const StepPlan saving = core_->build_step({{{a_, 0, 40, BlockTable{blocks(1, 3)}}}, {}}, now_);
  core_->worker_report(well_done(saving, 0), now_);
  EXPECT_THAT(take<PublishChunks>(), IsEmpty());
  core_->worker_report(well_done(saving, 1), now_);
  EXPECT_THAT(take<PublishChunks>(), SizeIs(1));

  add("b", 40);
  EXPECT_EQ(lookup("b").num_external, 32u);
  core_->allocated(RequestId{"b"}, 32, {blocks(4, 3)}, now_);
  const StepPlan loading = core_->build_step({{{RequestId{"b"}, 32, 8, BlockTable{blocks(4, 3)}}}, {}}, now_);
  WorkerReport worse = well_done(loading, 1);
  worse.loads[0].tokens_loaded = 16;
  core_->worker_report(worse, now_);
  EXPECT_EQ(core_->counters().loaded_tokens, 0u);
  EXPECT_NE(core_->pool().num_pins(), 0u);
  core_->worker_report(well_done(loading, 0), now_);
  EXPECT_EQ(core_->counters().loaded_tokens, 16u);
  EXPECT_EQ(core_->pool().num_pins(), 0u);
}

TEST_F(TwoRanks, RefusedAccessesOfAllRanksAreCounted) {
  WorkerReport report;
  for (report.rank = 0; report.rank < 2; ++report.rank) {
    report.accesses_refused = report.rank + 3;
    core_->worker_report(report, now_);
  }
  EXPECT_EQ(core_->counters().accesses_refused, 7U);
}

TEST_F(TwoRanks, ARankThatReportsALoadTwiceIsCaughtBeforeTheOthersIsMissing) {
  add("a", 40);
  lookup("a");
  core_->allocated(a_, 0, {blocks(1, 3)}, now_);
  const StepPlan saving = core_->build_step({{{a_, 0, 40, BlockTable{blocks(1, 3)}}}, {}}, now_);
  for (std::uint32_t rank = 0; rank < 2; ++rank) core_->worker_report(well_done(saving, rank), now_);
  add("b", 40);
  lookup("b");
  core_->allocated(RequestId{"b"}, 32, {blocks(4, 3)}, now_);
  const StepPlan loading = core_->build_step({{{RequestId{"b"}, 32, 8, BlockTable{blocks(4, 3)}}}, {}}, now_);
  WorkerReport once = well_done(loading, 0);
  once.saves.clear();
  core_->worker_report(once, now_);
  EXPECT_BREAKS(core_->worker_report(once, now_), "exactly-once");
}

class OnDevice : public CoreBench {
 protected:
  OnDevice() : CoreBench(config()) { cache(24); }
  static CoreConfig config() {
    CoreConfig config = sizes(8, 4, 16);
    config.on_device = true;
    return config;
  }
  Answer lookup() { return core_->lookup(RequestId{"r"}, 0, now_); }
  void admit(std::uint32_t num_external) { core_->allocated(RequestId{"r"}, num_external, {blocks(1, 8)}, now_); }
  StepInput computes(std::uint32_t from) const { return {{{RequestId{"r"}, from, 1, BlockTable{blocks(1, 8)}}}, {}}; }
  void preempt() { build({{}, {RequestId{"r"}}}); }
};

TEST_F(OnDevice, ALoadIsAsynchronousAndMayEndSomeStepsLater) {
  add("r", 25);
  EXPECT_EQ(lookup().num_external, 24u);
  EXPECT_TRUE(lookup().is_async);
  admit(24);
  const StepPlan plan = core_->build_step({}, now_ += kMillisecond);
  ASSERT_EQ(plan.loads.size(), 1u);
  EXPECT_TRUE(plan.loads[0].is_async);
  for (int i = 0; i < 3; ++i) build();
  EXPECT_TRUE(core_->has_unreported_loads());
  core_->worker_report(well_done(plan), now_);
  EXPECT_FALSE(core_->has_unreported_loads());
  admit(0);
  build(computes(24));
  const FinishedRequest done = core_->finished(RequestId{"r"}, 25, {blocks(1, 8)}, false, now_);
  ASSERT_EQ(done.admissions.size(), 1u);
  EXPECT_EQ(done.admissions[0].loaded, 24u);
}

TEST_F(OnDevice, ARequestThatWasLoadedInVainIsNotLoadedAgainBeforeItHasComputedMore) {
  add("r", 25);
  EXPECT_EQ(lookup().num_external, 24u);
  admit(24);
  build();
  admit(0);
  build(computes(24));
  for (int i = 0; i < 3; ++i) {
    preempt();
    EXPECT_EQ(lookup().num_external, 0u);
    EXPECT_FALSE(lookup().is_async);
    admit(0);
    build(computes(24));
  }
  core_->update_tokens(RequestId{"r"}, 25, std::span(tokens_).subspan(25, 2));
  build(computes(26));
  preempt();
  EXPECT_EQ(lookup().num_external, 26u);
}

}  // namespace
}  // namespace kvferry::sim
