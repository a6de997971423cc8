#include "connector/core/worker_core.h"

#include <gtest/gtest.h>

#include <limits>

#include "check_throws.h"

namespace kvferry {
namespace {

constexpr TimeNs kNow = kSecond;

PullOrder order(std::uint64_t pull, std::vector<ChunkRef> local, std::int64_t timeout_ms = 100) {
  PullOrder made;
  made.pull = pull;
  made.timeout_ms = timeout_ms;
  for (const ChunkRef chunk : local) made.items.push_back({{0, 1}, chunk, 4, {7}});
  return made;
}

class Worker : public ::testing::Test {
 protected:
  sim::ChecksThrow checks_;
  WorkerCore core_{2, 8};  // the worker of rank 2, with 8 slots
};

TEST_F(Worker, ASlotIsReadableOnlyWholeAndInItsOwnGeneration) {
  EXPECT_FALSE(core_.readable({3, 0}));
  core_.begin_write({3, 1});
  EXPECT_FALSE(core_.readable({3, 1}));
  core_.saved({{3, 1}, true, 99});
  EXPECT_TRUE(core_.readable({3, 1}));
  EXPECT_FALSE(core_.readable({3, 2}));
  core_.begin_write({3, 2});
  core_.saved({{3, 2}, false, 0});
  EXPECT_FALSE(core_.readable({3, 1}));
  EXPECT_FALSE(core_.readable({3, 2}));
  EXPECT_FALSE(core_.readable({80, 1}));  // there is no such slot; a load of it fails, but the process goes on
}

TEST_F(Worker, ASlotIsNeverWrittenTwiceAtOnceNorByAnOlderPlan) {
  core_.begin_write({3, 2});
  EXPECT_BREAKS(core_.begin_write({3, 3}), "fenced-reuse");
  core_.end_write({3, 2}, true);
  EXPECT_BREAKS(core_.begin_write({3, 1}), "fenced-reuse");
  EXPECT_BREAKS(core_.begin_write({3, 2}), "fenced-reuse");
  EXPECT_BREAKS(core_.end_write({3, 2}, true), "exactly-once");
}

TEST_F(Worker, EachPlanComesOnceAndInOrder) {
  core_.begin_step(1);
  core_.begin_step(5);
  EXPECT_BREAKS(core_.begin_step(5), "exactly-once");
  EXPECT_BREAKS(core_.begin_step(4), "exactly-once");
}

TEST_F(Worker, ARefusedAccessIsReportedOnceAlsoWithoutAnotherResult) {
  core_.accesses_refused(0);
  EXPECT_FALSE(core_.take_report());
  for (const std::uint64_t total : {2U, 5U}) core_.accesses_refused(total);
  EXPECT_EQ(core_.take_report().value().accesses_refused, 5U);
  core_.accesses_refused(5);
  EXPECT_FALSE(core_.take_report());
  core_.accesses_refused(6);
  EXPECT_EQ(core_.take_report().value().accesses_refused, 1U);
}

TEST_F(Worker, AReportTellsWhatHappenedOnce) {
  EXPECT_FALSE(core_.take_report());
  core_.begin_step(7);
  core_.begin_write({1, 1});
  core_.saved({{1, 1}, true, 42});
  LoadJob job;
  job.request_id = "r";
  job.attempt = 3;
  core_.loaded(job, {16, {{5, 9}}});
  const auto report = core_.take_report();
  ASSERT_TRUE(report);
  EXPECT_EQ(report->rank, 2u);
  EXPECT_EQ(report->step, 7u);
  ASSERT_EQ(report->saves.size(), 1u);
  EXPECT_EQ(report->saves[0].checksum, 42u);
  ASSERT_EQ(report->loads.size(), 1u);
  EXPECT_EQ(report->loads[0].tokens_loaded, 16u);
  EXPECT_EQ(report->loads[0].corrupt, (std::vector<ChunkRef>{{5, 9}}));
  EXPECT_FALSE(core_.take_report());
}

TEST_F(Worker, APullHoldsItsSlotsUntilItEndsOnce) {
  ASSERT_TRUE(core_.pull_ordered(order(11, {{0, 1}, {1, 1}}), kNow));
  EXPECT_BREAKS(core_.begin_write({0, 2}), "fenced-reuse");
  const PullOutcome outcome = core_.pull_ended(11, {true, false}, "checksum mismatch");
  EXPECT_EQ(outcome.pull, 11u);
  EXPECT_EQ(outcome.rank, 2u);
  EXPECT_TRUE(core_.readable({0, 1}));
  EXPECT_FALSE(core_.readable({1, 1}));
  EXPECT_EQ(core_.num_pulls(), 0u);
  EXPECT_BREAKS(core_.pull_ended(11, {true, true}, ""), "exactly-once");
}

TEST_F(Worker, AChunkInAFrameIsLoadedButNotReadUntilItsSlotIsWritten) {
  ASSERT_TRUE(core_.pull_ordered(order(11, {{0, 1}, {1, 1}, {2, 1}}), kNow));
  const PullOutcome outcome = core_.pull_ended(11, {true, true, false}, "", {true, true, true});
  EXPECT_EQ(outcome.in_frames, (std::vector<bool>{true, true, false}));
  for (const std::uint32_t slot : {0u, 1u}) {
    EXPECT_TRUE(core_.loadable({slot, 1}));
    EXPECT_FALSE(core_.readable({slot, 1}));
    EXPECT_FALSE(core_.loadable({slot, 2}));
    EXPECT_FALSE(core_.writable({slot, 2}));
    EXPECT_BREAKS(core_.begin_write({slot, 2}), "fenced-reuse");
  }
  EXPECT_FALSE(core_.loadable({2, 1})) << "its transfer has failed";
  EXPECT_TRUE(core_.writable({2, 2}));
  EXPECT_BREAKS(core_.end_write({0, 1}, true), "exactly-once");
  core_.slot_written({0, 1}, true);
  core_.slot_written({1, 1}, false);
  EXPECT_BREAKS(core_.slot_written({0, 1}, true), "exactly-once");
  EXPECT_TRUE(core_.readable({0, 1}));
  EXPECT_TRUE(core_.loadable({0, 1}));
  EXPECT_FALSE(core_.loadable({1, 1}));
  EXPECT_TRUE(core_.writable({1, 2}));
  EXPECT_FALSE(core_.loadable({80, 1}));
}

TEST_F(Worker, ASaveInAFrameIsToldTwiceAndItsSlotIsReadAfterTheSecondTime) {
  for (const std::uint32_t slot : {0u, 1u}) {
    core_.begin_write({slot, 1});
    core_.saved({{slot, 1}, true, 99, true});
    EXPECT_TRUE(core_.loadable({slot, 1}));
    EXPECT_FALSE(core_.readable({slot, 1}));
    EXPECT_BREAKS(core_.begin_write({slot, 2}), "fenced-reuse");
  }
  EXPECT_BREAKS(core_.saved({{0, 1}, true, 99, true}), "exactly-once");
  EXPECT_EQ(core_.take_report().value().saves.size(), 2u);
  core_.saved({{0, 1}, true, 99});
  core_.saved({{1, 1}, false, 0});
  EXPECT_TRUE(core_.readable({0, 1}));
  EXPECT_FALSE(core_.loadable({1, 1}));
  EXPECT_TRUE(core_.writable({1, 2}));
  EXPECT_BREAKS(core_.saved({{0, 1}, true, 99}), "exactly-once");
  const auto report = core_.take_report().value();
  ASSERT_EQ(report.saves.size(), 2u);
  EXPECT_FALSE(report.saves[0].is_in_frame || report.saves[1].is_in_frame);
  EXPECT_TRUE(report.saves[0].ok && !report.saves[1].ok);
}

TEST_F(Worker, AnOverduePullIsNamedOnceAndStillHoldsItsSlots) {
  ASSERT_TRUE(core_.pull_ordered(order(11, {{0, 1}}, 100), kNow));
  ASSERT_TRUE(core_.pull_ordered(order(12, {{1, 1}}, 900), kNow));
  EXPECT_TRUE(core_.overdue_pulls(kNow + 99 * kMillisecond).empty());
  EXPECT_EQ(core_.overdue_pulls(kNow + 100 * kMillisecond), (std::vector<std::uint64_t>{11}));
  EXPECT_TRUE(core_.overdue_pulls(kNow + 200 * kMillisecond).empty());
  EXPECT_BREAKS(core_.begin_write({0, 2}), "fenced-reuse");  // the transfer may still write into the slot
}

TEST_F(Worker, AnOrderThatCantBeRightIsRefusedAndBeginsNothing) {
  ASSERT_TRUE(core_.pull_ordered(order(11, {{0, 1}}), kNow));
  const std::vector<PullOrder> bad = {
      order(12, {{1, 1}, {std::numeric_limits<std::uint32_t>::max(), 1}}),
      order(12, {{1, 1}, {8, 1}}),
      order(12, {{1, 1}, {0, 2}}),  // one of the slots is being written
      order(12, {{1, 1}, {1, 2}}),  // the same slot twice
      order(12, {{1, 0}}),          // the generation is not a newer one
      order(11, {{1, 1}}),          // the number of a pull that is in progress
      order(12, {{1, 1}}, 0),
      order(12, {{1, 1}}, -1),
      order(12, {{1, 1}}, std::numeric_limits<std::int64_t>::max()),
  };
  for (const PullOrder& one : bad) EXPECT_FALSE(core_.pull_ordered(one, kNow));
  EXPECT_EQ(core_.num_pulls(), 1u);
  EXPECT_TRUE(core_.writable({1, 1}));
  EXPECT_FALSE(core_.writable({0, 9}));
  EXPECT_FALSE(core_.writable({8, 1}));
}

}  // namespace
}  // namespace kvferry
