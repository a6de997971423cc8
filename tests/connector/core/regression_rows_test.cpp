// Tests the five regression rows (README: "Promises") with the numbers of the original failures. Row 002, the exits of
// a scheduler, is in a file of its own.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "core_bench.h"
#include "mini_engine.h"

namespace kvferry::sim {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class Rows : public ::testing::Test {
 protected:
  /// Runs steps until all requests have ended, and all their chunks are saved and reported.
  void run(MiniEngine& engine) {
    for (int i = 0; i < 5000 && engine.num_unfinished() > 0; ++i) step(engine);
    ASSERT_EQ(engine.num_unfinished(), 0u);
    for (int i = 0; i < 3; ++i) step(engine);
  }
  void step(MiniEngine& engine) {
    engine.step(now_ += kMillisecond);
    for (const Action& action : engine.take_actions())
      if (const auto* line = std::get_if<LogLine>(&action)) log_.push_back(line->text);
  }
  static RequestSpec request(const std::string& id, std::vector<std::int32_t> prompt, std::uint32_t max_tokens) {
    RequestSpec spec;
    spec.id = id;
    spec.prompt = std::move(prompt);
    spec.max_tokens = max_tokens;
    return spec;
  }
  static std::vector<std::int32_t> plain_output(const RequestSpec& spec) {
    const Text text = say(spec.prompt, spec.max_tokens, spec.stops, spec.extras);
    return {text.tokens.begin() + static_cast<std::ptrdiff_t>(spec.prompt.size()), text.tokens.end()};
  }
  /// Returns the load of the request's last admission.
  static const LoadJob* last_load(const MiniEngine& engine, const std::string& id) {
    const LoadJob* last = nullptr;
    for (const StepPlan& plan : engine.plans())
      for (const LoadJob& job : plan.loads)
        if (job.request_id == id) last = &job;
    return last;
  }

  ChecksThrow checks_;
  StampBook book_;
  TimeNs now_ = kSecond;
  std::vector<std::string> log_;
};

// ---- row 000: a load that was never scheduled ----

class Row000 : public Rows, public ::testing::WithParamInterface<bool> {};

TEST_P(Row000, AResumedRequestLoadsWhatTheEngineLostIntoTheBlocksItGot) {
  const bool save_decode_cache = GetParam();
  CoreConfig core;
  core.chunk_tokens = 16;
  core.num_slots = 64;
  core.save_decode_cache = save_decode_cache;
  EngineConfig config;
  config.num_blocks = 7;
  MiniEngine engine(core, config, book_);
  const RequestSpec zero = request("0", std::vector<std::int32_t>(34, 1), 35);
  const RequestSpec one = request("1", std::vector<std::int32_t>(34, 2), 35);
  engine.add(zero, now_);
  engine.add(one, now_);
  step(engine);
  EXPECT_THAT(engine.table("0"), ElementsAre(1, 2, 3));
  EXPECT_THAT(engine.table("1"), ElementsAre(4, 5, 6));
  while (engine.num_preemptions() == 0) step(engine);
  EXPECT_THAT(engine.table("0"), ElementsAre(1, 2, 3, 6));
  EXPECT_THAT(engine.table("1"), ElementsAre());
  while (engine.finished().empty()) step(engine);
  ASSERT_TRUE(engine.finished().contains("0"));
  step(engine);
  // block 4 is a prefix hit; blocks 5 and 6 had the KV of request 0
  EXPECT_THAT(engine.table("1"), ElementsAre(4, 5, 6, 3));

  const std::uint32_t hit = save_decode_cache ? 48 : 34;
  const LoadJob* job = last_load(engine, "1");
  ASSERT_NE(job, nullptr);
  ASSERT_EQ(job->block_ids.size(), 1u);
  EXPECT_THAT(job->block_ids[0], ElementsAre(5, 6));
  std::uint32_t tokens = 0;
  for (const LoadItem& item : job->items) tokens += item.num_tokens;
  EXPECT_EQ(tokens, hit - 16);

  run(engine);
  EXPECT_EQ(engine.outputs().at("0"), plain_output(zero));
  EXPECT_EQ(engine.outputs().at("1"), plain_output(one));
  const std::vector<Admission>& admissions = engine.finished().at("1").admissions;
  ASSERT_EQ(admissions.size(), 2u);
  EXPECT_TRUE(admissions[1].resumed);
  EXPECT_EQ(admissions[1].hit, hit);
  EXPECT_EQ(admissions[1].local, 16u);
  EXPECT_EQ(admissions[1].to_load, hit - 16);
  EXPECT_EQ(admissions[1].loaded, hit - 16);
  const std::string line = fmt::format(
      "(resumed): of 49 tokens {} were found in a cache, 16 of these in the engine's; of {} tokens to load {} were "
      "loaded",
      hit, hit - 16, hit - 16);
  EXPECT_THAT(log_, ::testing::Contains(HasSubstr(line)));
}

INSTANTIATE_TEST_SUITE_P(SaveDecodeCache, Row000, ::testing::Bool(),
                         [](const auto& p) { return p.param ? "On" : "Off"; });

// ---- row 001: a lookup that changed its answer ----

class Row001 : public CoreBench {
 protected:
  Row001() : CoreBench(sizes(16, 16, 64)) { add("a", 48); }
  const RequestId a_{"a"};
};

TEST_F(Row001, AskingAgainInAnAttemptGivesTheSameHitHoweverOften) {
  compute("a", 48, {1, 2, 3});
  build({{}, {a_}});
  const Answer first = core_->lookup(a_, 16, now_);
  EXPECT_EQ(first.num_external, 31u);
  const std::size_t pins = core_->pool().num_pins();
  const std::uint64_t lookups = core_->counters().lookups;
  for (int i = 0; i < 100; ++i) {
    EXPECT_EQ(core_->lookup(a_, 16, now_).num_external, 31u);
    // the same hit, minus the tokens that the engine has itself
    EXPECT_EQ(core_->lookup(a_, 0, now_).num_external, 47u);
  }
  EXPECT_EQ(core_->pool().num_pins(), pins);
  EXPECT_EQ(core_->counters().lookups, lookups);
  EXPECT_EQ(core_->num_open_lookups(), 1u);
}

TEST_F(Row001, ALookupThatTheEngineCouldAnswerItselfStillLoadsWhenItsBlocksAreGone) {
  compute("a", 48, {1, 2, 3});
  build({{}, {a_}});
  add("b", 33);
  const RequestId b{"b"};
  EXPECT_EQ(core_->lookup(b, 32, now_).num_external, 0u);
  EXPECT_EQ(core_->lookup(b, 16, now_).num_external, 16u);
  core_->allocated(b, 16, {{4, 5, 6}}, now_);
  const StepPlan plan = build({{{b, 32, 1, BlockTable{{4, 5, 6}}}}, {}});
  ASSERT_EQ(plan.loads.size(), 1u);
  EXPECT_THAT(plan.loads[0].block_ids[0], ElementsAre(5));
}

TEST_F(Row001, APreemptedRequestsBlockListIsReplacedAndItsSavesRestart) {
  const StepPlan first = compute("a", 40, {1, 2, 3});
  EXPECT_THAT(saved_blocks(first), ElementsAre(1, 2));
  // the tail of 8 tokens is saved from the blocks that the request had
  EXPECT_THAT(saved_blocks(build({{}, {a_}})), ElementsAre(3));
  core_->reset_cache();
  EXPECT_EQ(core_->lookup(a_, 0, now_).num_external, 0u);
  core_->allocated(a_, 0, {{7, 8, 9}}, now_);
  const StepPlan resumed = build({{{a_, 0, 48, BlockTable{{7, 8, 9}}}}, {}});
  // The blocks 1, 2, 3 and the chunks that were saved from them are gone.
  EXPECT_THAT(saved_blocks(resumed), ElementsAre(7, 8, 9));
  core_->update_tokens(a_, 48, std::span(tokens_).subspan(48, 17));
  const StepPlan grown = build({{{a_, 48, 16, BlockTable{{7, 8, 9, 10}}}}, {}});
  EXPECT_THAT(saved_blocks(grown), ElementsAre(10));
}

TEST_F(Row001, AResumedRequestLooksUpItsGeneratedTokensToo) {
  compute("a", 48, {1, 2, 3});
  core_->update_tokens(a_, 48, std::span(tokens_).subspan(48, 17));
  build({{{a_, 48, 16, BlockTable{{1, 2, 3, 4}}}}, {}});
  build({{}, {a_}});
  EXPECT_EQ(core_->lookup(a_, 0, now_).num_external, 64u);  // 64 of 65 tokens, 17 of which were generated
}

TEST_F(Row001, AFullHitLeavesOneTokenToCompute) {
  compute("a", 48, {1, 2, 3});
  add("b", 48);
  EXPECT_EQ(core_->lookup(RequestId{"b"}, 32, now_).num_external, 15u);
  core_->allocated(RequestId{"b"}, 15, {{4, 5, 6}}, now_);
  const StepPlan plan = build({{{RequestId{"b"}, 47, 1, BlockTable{{4, 5, 6}}}}, {}});
  ASSERT_EQ(plan.loads.size(), 1u);
  EXPECT_EQ(plan.loads[0].items[0].num_tokens, 15u);
  EXPECT_EQ(plan.loads[0].items[0].chunk_tokens, 16u);
}

TEST_F(Row001, ARequestResumedInItsPreemptionStepSavesNothingFromBlocksNotLoadedYet) {
  compute("a", 48, {1, 2, 3});
  // reset_prefix_cache(reset_running_requests): the request is preempted between two steps, and admitted again in the
  // next step.
  EXPECT_EQ(core_->lookup(a_, 0, now_).num_external, 47u);
  core_->allocated(a_, 47, {{4, 5, 6}}, now_);
  const StepPlan plan = build({{{a_, 47, 1, BlockTable{{4, 5, 6}}}}, {a_}});
  EXPECT_THAT(saved_blocks(plan), ElementsAre());
  ASSERT_EQ(plan.loads.size(), 1u);
  EXPECT_EQ(core_->finished(a_, 48, {{4, 5, 6}}, true, now_).preemptions, 1u);
}

TEST_F(Row001, ARequestThatMayNotBeCachedCountsAPreemptionInItsResumptionStepOnce) {
  NewRequest added = request("p", 200);
  added.cacheable = false;
  core_->add_request(added, now_);
  compute("p", 100, {1, 2, 3, 4, 5, 6, 7});
  EXPECT_EQ(core_->lookup(added.id, 0, now_).num_external, 0u);
  core_->allocated(added.id, 0, {{8}}, now_);
  EXPECT_TRUE(build({{{added.id, 0, 16, BlockTable{{8}}}}, {added.id}}).empty());
  EXPECT_EQ(core_->finished(added.id, 16, {{8}}, false, now_).preemptions, 1u);
}

using Row001Engine = Rows;

TEST_F(Row001Engine, TwoPromptsThatDifferInTheirFirstTokenLoad40Of40AfterAPreemption) {
  CoreConfig core;
  core.chunk_tokens = 8;
  core.num_slots = 64;
  core.save_decode_cache = false;
  core.save_partial_chunks = false;
  EngineConfig config;
  config.num_blocks = 10;
  config.prefix_caching = false;
  MiniEngine engine(core, config, book_);
  const std::uint32_t max_out = 5 + 16 * ((config.num_blocks - 3) - 1);
  std::vector<std::int32_t> prompt(44, 3);
  const RequestSpec zero = request("0", prompt, max_out);
  prompt[0] = 4;
  const RequestSpec one = request("1", prompt, max_out);
  engine.add(zero, now_);
  engine.add(one, now_);
  run(engine);
  EXPECT_EQ(engine.outputs().at("0"), plain_output(zero));
  EXPECT_EQ(engine.outputs().at("1"), plain_output(one));
  EXPECT_THAT(log_, ElementsAre(HasSubstr("(resumed): of 65 tokens 40 were found in a cache, 0 of these in the "
                                          "engine's; of 40 tokens to load 40 were loaded")));
}

// ---- row 003: a counter that became negative ----

class Row003 : public CoreBench {
 protected:
  Row003() : CoreBench(sizes(500, 100, 64)) {}
  /// Checks that no counter has decreased, and that no admission counts more tokens than it has.
  void expect_sane() {
    const CoreCounters& c = core_->counters();
    EXPECT_GE(c.hit_tokens, last_.hit_tokens);
    EXPECT_GE(c.loaded_tokens, last_.loaded_tokens);
    EXPECT_GE(c.resumed_hit_tokens, last_.resumed_hit_tokens);
    EXPECT_GE(c.lookups, last_.lookups);
    EXPECT_LE(c.resumed_hit_tokens, c.hit_tokens);
    EXPECT_LE(c.loaded_tokens, c.hit_tokens);
    last_ = c;
  }
  CoreCounters last_;
  const RequestId a_{"a"};
};

TEST_F(Row003, CountsStaySaneWhenAPartialPrefillIsPreemptedAndTheHitGrowsFrom1500To2000) {
  add("w", 1500);
  compute("w", 1500, blocks(1, 15));
  add("a", 2500);
  EXPECT_EQ(core_->lookup(a_, 0, now_).num_external, 1500u);
  core_->allocated(a_, 1500, {blocks(20, 18)}, now_);
  EXPECT_EQ(core_->counters().hit_tokens, 1500u);
  build({{{a_, 1500, 300, BlockTable{blocks(20, 18)}}}, {}});  // a part of the prefill of w
  expect_sane();

  add("v", 2001);  // meanwhile another request has saved the next 500 tokens
  // the engine has more tokens than the pool, so the answer is 0 and not -100
  EXPECT_EQ(core_->lookup(RequestId{"v"}, 1600, now_).num_external, 0u);
  core_->allocated(RequestId{"v"}, 0, {blocks(40, 21)}, now_);
  build({{{RequestId{"v"}, 1600, 401, BlockTable{blocks(40, 21)}}}, {a_}});
  expect_sane();

  for (int refused = 0; refused < 3; ++refused) {  // lookups without an allocation count nothing
    EXPECT_EQ(core_->lookup(a_, 0, now_).num_external, 2000u);
    build();
    expect_sane();
    EXPECT_EQ(core_->counters().hit_tokens, 1500u);
  }
  EXPECT_EQ(core_->lookup(a_, 1500, now_).num_external, 500u);
  core_->allocated(a_, 500, {blocks(20, 20)}, now_);
  build({{{a_, 2000, 500, BlockTable{blocks(20, 25)}}}, {}});
  expect_sane();
  EXPECT_EQ(core_->counters().hit_tokens, 2000u);
  EXPECT_EQ(core_->counters().resumed, 1u);
  EXPECT_EQ(core_->counters().resumed_hit_tokens, 500u);

  const FinishedRequest done = core_->finished(a_, 2500, {blocks(20, 25)}, false, now_);
  // each admission is counted once, and the second one does not change the first
  ASSERT_EQ(done.admissions.size(), 2u);
  for (const Admission& admission : done.admissions) {
    EXPECT_LE(admission.to_load, admission.hit);
    EXPECT_EQ(admission.local + admission.to_load, admission.hit);
    EXPECT_LT(admission.hit, 2500u);
  }
  EXPECT_EQ(done.admissions[0].hit, 1500u);
  EXPECT_EQ(done.admissions[0].local, 0u);
  EXPECT_EQ(done.admissions[1].hit, 2000u);
  EXPECT_EQ(done.admissions[1].local, 1500u);
}

// ---- row 004: decode tokens that were never saved ----

class Row004 : public Rows, public ::testing::WithParamInterface<bool> {};

TEST_P(Row004, EveryGeneratedTokenButTheLastIsSavedInOrderOnceAndASecondRequestLoadsAllOfIt) {
  CoreConfig core;
  core.chunk_tokens = 256;
  core.num_slots = 32;
  EngineConfig config;
  config.num_blocks = 300;
  config.token_budget = 4096;
  config.prefix_caching = false;
  config.async = GetParam();
  MiniEngine engine(core, config, book_);
  std::vector<std::int32_t> prompt(100);
  std::iota(prompt.begin(), prompt.end(), 1);
  const RequestSpec first = request("first", prompt, 2000);
  engine.add(first, now_);
  run(engine);
  std::uint32_t saved = 0, saved_when_full = 0;
  for (const StepPlan& plan : engine.plans()) {
    for (const auto* jobs : {&plan.saves_before, &plan.saves_after}) {
      for (const SaveJob& job : *jobs) {
        for (const SaveItem& item : job.items) {
          EXPECT_EQ(item.first_token, 0u);  // chunks are in order, and each chunk starts at the first block of its job
          EXPECT_EQ(item.num_tokens, std::min(256u, 2099 - saved));
          saved += item.num_tokens;
          if (jobs == &plan.saves_after) saved_when_full += item.num_tokens;
        }
      }
    }
  }
  EXPECT_EQ(saved, 2099u);
  // each chunk was saved in the step that filled it; the last 51 tokens are saved at the end
  EXPECT_EQ(saved_when_full, 8 * 256u);
  EXPECT_EQ(engine.core().counters().saved_tokens, 2099u);

  const Text text = say(prompt, 2000, false, "");
  const RequestSpec second = request("second", text.tokens, 10);
  engine.add(second, now_);
  run(engine);
  EXPECT_EQ(engine.outputs().at("second"), plain_output(second));
  ASSERT_EQ(engine.finished().at("second").admissions.size(), 1u);
  const Admission& admission = engine.finished().at("second").admissions[0];
  EXPECT_EQ(admission.hit, 2099u);
  EXPECT_EQ(admission.to_load, 2099u);
  EXPECT_EQ(admission.loaded, 2099u);
}

INSTANTIATE_TEST_SUITE_P(Scheduling, Row004, ::testing::Bool(),
                         [](const auto& p) { return p.param ? "Async" : "Sync"; });

}  // namespace
}  // namespace kvferry::sim
