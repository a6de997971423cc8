// Replays every recorded trace of real vLLM: the core must give the recorded answers, and vLLM must follow the rules of
// the engine model.
#include <gtest/gtest.h>

#include <map>

#include "check_throws.h"
#include "core_replay.h"
#include "engine_rules.h"

namespace kvferry::replay {
namespace {

class VllmTraces : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { traces_ = read_traces(KVFERRY_TRACES); }
  void SetUp() override { ASSERT_GE(traces_.size(), 5u); }

  static std::vector<Trace> traces_;
  sim::ChecksThrow checks_;
};
std::vector<Trace> VllmTraces::traces_;

TEST_F(VllmTraces, TheCoreAnswersAsItDid) {
  for (const Trace& trace : traces_) {
    CoreReplay replay(trace);
    std::size_t line = 1;
    try {
      for (const Json& call : trace.calls) {
        line += 1;
        replay.play(call);
      }
    } catch (const std::exception& error) {
      ADD_FAILURE() << trace.name << ", line " << line << ": " << error.what();
      continue;
    }
    EXPECT_EQ(replay.core().num_requests(), 0u) << trace.name;
    EXPECT_EQ(replay.core().num_open_lookups(), 0u) << trace.name;
    EXPECT_EQ(replay.core().pool().num_pinned(), 0u) << trace.name;
    EXPECT_EQ(replay.core().pool().num_writing(), 0u) << trace.name;
  }
}

TEST_F(VllmTraces, VllmKeepsTheRulesOfTheEngineModel) {
  std::map<std::string, EngineRules::Tally> tallies;
  for (const Trace& trace : traces_) {
    EngineRules rules(trace);
    try {
      for (const Json& call : trace.calls) rules.check(call);
      rules.check_end();
    } catch (const std::exception& error) {
      ADD_FAILURE() << error.what();
    }
    tallies[trace.name] = rules.tally();
  }
  // Each trace was recorded for certain events, which it must contain.
  for (const char* name : {"preemption", "preemption-async", "samples", "windows"}) {
    EXPECT_GT(tallies[name].preemptions, 0u) << name;
    EXPECT_GT(tallies[name].resumptions, 0u) << name;
    EXPECT_GT(tallies[name].hits, 0u) << name;
  }
  EXPECT_GT(tallies["preemption"].chunked_prefills, 0u);
  for (const char* name : {"aborts", "aborts-async"}) EXPECT_GT(tallies[name].aborts, 5u) << name;
  for (const char* name : {"failed-loads", "failed-loads-async", "windows"})
    EXPECT_GT(tallies[name].failed_loads, 0u) << name;
  for (const char* name : {"windows", "preemption-async"}) EXPECT_GT(tallies[name].async_loads, 0u) << name;
  EXPECT_GT(tallies["speculative"].drafts, 0u);
  EXPECT_GT(tallies["full-hits"].hits, 2u);
  EXPECT_GT(tallies["windows"].null_blocks, 0u);
}

}  // namespace
}  // namespace kvferry::replay
