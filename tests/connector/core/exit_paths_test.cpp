// Tests regression row 002, a count that was not reset at the end of its attempt. A scheduler may look a request up and
// then not admit it, for many reasons. None of them may leave anything behind, and the next attempt must count from 0.
#include <gmock/gmock.h>

#include <deque>

#include "core_bench.h"

namespace kvferry::sim {
namespace {

struct Waiting {
  std::string id;
  std::uint32_t num_tokens = 0;
  bool prompt_embeds = false;
  int lora = 0;
  int priority = 0;
};

/// A scheduler with the same exits as vLLM's first scheduler. It calls the core in the required order, and never says
/// why it did not admit a request.
class ExitPathScheduler {
 public:
  explicit ExitPathScheduler(SchedulerCore& core) : core_(core) {}

  std::uint32_t budget = 1000;  // number of tokens in a step
  std::uint32_t max_seqs = 8;
  std::uint32_t free_blocks = 100, total_blocks = 100;
  std::uint32_t max_model_len = 1000;
  int max_loras = 8;
  std::deque<Waiting> waiting, swapped;
  std::vector<Waiting> running;
  std::vector<std::string> taken;  // names of the exits that the last step took

  StepInput schedule(TimeNs now) {
    StepInput input;
    taken.clear();
    schedule_swapped(input, now);
    schedule_prefills(input, now);
    priority_preemption(input, now);
    return input;
  }

 private:
  static std::uint32_t blocks_for(std::uint32_t tokens) { return (tokens + 15) / 16; }

  void admit(const Waiting& request, std::uint32_t num_external, StepInput& input, TimeNs now) {
    std::vector<BlockId> table(blocks_for(request.num_tokens));
    std::iota(table.begin(), table.end(), next_block_);
    next_block_ += static_cast<BlockId>(table.size());
    free_blocks -= static_cast<std::uint32_t>(table.size());
    core_.allocated(RequestId{request.id}, num_external, {table}, now);
    input.scheduled.push_back(
        {RequestId{request.id}, num_external, request.num_tokens - num_external, BlockTable{table}});
    running.push_back(request);
  }

  void schedule_swapped(StepInput& input, TimeNs now) {
    while (!swapped.empty()) {
      const Waiting request = swapped.front();
      const Answer answer = core_.lookup(RequestId{request.id}, 0, now);
      if (request.num_tokens - answer.num_external > budget) return taken.push_back("swapped");
      swapped.pop_front();
      admit(request, answer.num_external, input, now);
    }
  }

  void schedule_prefills(StepInput& input, TimeNs now) {
    std::deque<Waiting> leftover;
    for (; !waiting.empty(); waiting.pop_front()) {
      const Waiting request = waiting.front();
      const Answer answer = core_.lookup(RequestId{request.id}, 0, now);
      const auto leave = [&](const char* exit) {
        taken.push_back(exit);
        leftover.push_back(request);
      };
      if (request.num_tokens > max_model_len || blocks_for(request.num_tokens) > total_blocks) {
        taken.push_back(request.num_tokens > max_model_len ? "too long" : "never fits");
        core_.finished(RequestId{request.id}, 0, {{}}, true, now);
        continue;
      }
      if (blocks_for(request.num_tokens) > free_blocks) {
        taken.push_back("blocks");
        break;
      }
      if (!running.empty() && running.front().prompt_embeds != request.prompt_embeds) {
        leave("prompt embeds");
        continue;
      }
      if (request.lora > 0 && max_loras == 0) {
        leave("lora");
        continue;
      }
      if (request.num_tokens - answer.num_external > budget) {
        taken.push_back("budget");
        break;
      }
      if (running.size() >= max_seqs) {
        taken.push_back("sequences");
        break;
      }
      admit(request, answer.num_external, input, now);
    }
    waiting.insert(waiting.begin(), leftover.begin(), leftover.end());
  }

  void priority_preemption(StepInput& input, TimeNs now) {
    if (waiting.empty() || running.empty()) return;
    const Waiting& first = waiting.front();
    if (first.priority <= running.back().priority) return;
    // finds out how many blocks the request needs; it is admitted in a later step
    core_.lookup(RequestId{first.id}, 0, now);
    const Waiting victim = running.back();
    running.pop_back();
    free_blocks += blocks_for(victim.num_tokens);
    std::erase_if(input.scheduled, [&](const ScheduledRequest& s) { return s.id.value == victim.id; });
    input.preempted.push_back(RequestId{victim.id});
    waiting.push_back(victim);
    taken.push_back("priority");
  }

  SchedulerCore& core_;
  BlockId next_block_ = 200;
};

struct RefusalCase {
  std::string name;
  void (*close)(ExitPathScheduler&);  // makes the scheduler take this exit
  void (*open)(ExitPathScheduler&);
};

class Row002 : public CoreBench {
 protected:
  Row002() : CoreBench(sizes(16, 16, 64)), scheduler_(*core_) {}
  void expect_nothing_left() {
    EXPECT_EQ(core_->num_open_lookups(), 0u);
    EXPECT_EQ(core_->pool().num_pins(), 0u);
    EXPECT_EQ(core_->pool().num_pinned(), 0u);
  }
  static std::uint32_t loaded(const StepPlan& plan, const std::string& id) {
    std::uint32_t tokens = 0;
    for (const LoadJob& job : plan.loads)
      if (job.request_id == id)
        for (const LoadItem& item : job.items) tokens += item.num_tokens;
    return tokens;
  }
  ExitPathScheduler scheduler_;
};

class Row002Exits : public Row002, public ::testing::WithParamInterface<RefusalCase> {};

TEST_P(Row002Exits, AnAttemptThatFailedLeavesNothingAndTheNextOneCountsAfresh) {
  cache(48);
  add("a", 64);
  Waiting a{"a", 64, false, 1, 0};
  (GetParam().name == "swapped" ? scheduler_.swapped : scheduler_.waiting).push_back(a);
  GetParam().close(scheduler_);
  for (int attempt = 0; attempt < 3; ++attempt) {
    const std::uint64_t lookups = core_->counters().lookups;
    const StepPlan plan = build(scheduler_.schedule(now_));
    EXPECT_THAT(scheduler_.taken, ::testing::Contains(GetParam().name));
    EXPECT_TRUE(plan.loads.empty());
    EXPECT_EQ(core_->counters().lookups, lookups + 1) << "the answer of the attempt before is given again";
    expect_nothing_left();
  }
  EXPECT_EQ(core_->counters().loads, 0u);
  EXPECT_EQ(core_->counters().hit_tokens, 0u);

  core_->reset_cache();  // the next attempt finds an empty pool
  cache(32);
  GetParam().open(scheduler_);
  EXPECT_EQ(loaded(build(scheduler_.schedule(now_)), "a"), 32u);
  EXPECT_EQ(core_->counters().hit_tokens, 32u);
  expect_nothing_left();
}

INSTANTIATE_TEST_SUITE_P(
    Each, Row002Exits,
    ::testing::Values(RefusalCase{"budget", [](auto& s) { s.budget = 10; }, [](auto& s) { s.budget = 1000; }},
                      RefusalCase{"sequences", [](auto& s) { s.max_seqs = 0; }, [](auto& s) { s.max_seqs = 8; }},
                      RefusalCase{"blocks", [](auto& s) { s.free_blocks = 3; }, [](auto& s) { s.free_blocks = 100; }},
                      RefusalCase{"prompt embeds",
                                  [](auto& s) {
                                    s.running = {{"e", 1, true, 0, 0}};
                                  },
                                  [](auto& s) { s.running.clear(); }},
                      RefusalCase{"lora", [](auto& s) { s.max_loras = 0; }, [](auto& s) { s.max_loras = 8; }},
                      RefusalCase{"swapped", [](auto& s) { s.budget = 10; }, [](auto& s) { s.budget = 1000; }}),
    [](const auto& p) {
      std::string name = p.param.name;
      std::replace(name.begin(), name.end(), ' ', '_');
      return name;
    });

TEST_F(Row002, ARequestPreemptedByPriorityCountsAfreshAndTheOneThatTookItsPlaceHoldsNothing) {
  cache(48);
  add("a", 64);
  scheduler_.waiting.push_back({"a", 64, false, 0, 0});
  EXPECT_EQ(loaded(build(scheduler_.schedule(now_)), "a"), 48u);
  expect_nothing_left();

  add("b", 64);
  scheduler_.max_seqs = 1;
  scheduler_.waiting.push_back({"b", 64, false, 0, 1});
  build(scheduler_.schedule(now_));
  EXPECT_THAT(scheduler_.taken, ::testing::ElementsAre("sequences", "priority"));
  expect_nothing_left();

  core_->reset_cache();
  cache(32);
  scheduler_.max_seqs = 8;
  const StepPlan plan = build(scheduler_.schedule(now_));
  EXPECT_EQ(loaded(plan, "a"), 32u);
  EXPECT_EQ(loaded(plan, "b"), 32u);
  expect_nothing_left();
  const FinishedRequest done = core_->finished(RequestId{"a"}, 64, {blocks(1, 4)}, false, now_);
  EXPECT_EQ(done.preemptions, 1u);
  ASSERT_EQ(done.admissions.size(), 2u);
  EXPECT_EQ(done.admissions[1].hit, 32u);
}

TEST_F(Row002, ARequestThatCanNeverBeScheduledIsDroppedWhole) {
  cache(48);
  add("long", 1200);
  add("big", 900);
  scheduler_.total_blocks = 50;
  scheduler_.waiting.push_back({"long", 1200, false, 0, 0});
  scheduler_.waiting.push_back({"big", 900, false, 0, 0});
  const std::size_t before = core_->num_requests();
  build(scheduler_.schedule(now_));
  EXPECT_THAT(scheduler_.taken, ::testing::ElementsAre("too long", "never fits"));
  EXPECT_EQ(core_->num_requests(), before - 2);
  EXPECT_FALSE(core_->knows(RequestId{"long"}));
  EXPECT_FALSE(core_->knows(RequestId{"big"}));
  expect_nothing_left();
  EXPECT_EQ(core_->num_fetches(), 0u);
}

}  // namespace
}  // namespace kvferry::sim
