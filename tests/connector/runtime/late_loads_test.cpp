// Tests a node whose GPU ends a load some steps after the step that began it, while the engine goes on.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/connector/runtime/test_node.h"
#include "transport/base/wire.h"

namespace kvferry {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Pair;

class LateLoads : public ::testing::TestWithParam<const char*> {
 protected:
  LateLoads() {
    node_.scheduler->add_request(new_request("p", prompt_));
    EXPECT_EQ(node_.lookup("p"), 0u);
    node_.scheduler->allocated(RequestId{"p"}, 0, {kSomeBlocks});
    node_.step({{{RequestId{"p"}, 0, 21, BlockTable{kSomeBlocks}}}, {}}, [&] { node_.compute(kSomeBlocks, 0, 21, 1); });
    node_.scheduler->finished(RequestId{"p"}, 21, {kSomeBlocks}, false);
    settle();
    node_.wipe();
  }
  void settle() {
    while (node_.scheduler->has_unreported_saves() || node_.scheduler->has_unreported_loads()) {
      device_->run_all();
      node_.step();
    }
  }
  /// Begins the load of request "d" into kOtherBlocks, and runs three more steps.
  void begin_load() {
    node_.scheduler->add_request(new_request("d", prompt_));
    ASSERT_EQ(node_.lookup("d"), 16u);
    node_.scheduler->allocated(RequestId{"d"}, 16, {kOtherBlocks});
    for (int step = 0; step < 4; ++step) node_.step();
    ASSERT_THAT(node_.finished_loads, IsEmpty());
    ASSERT_TRUE(node_.scheduler->has_unreported_loads());
    ASSERT_EQ(num_pinned(), 2);
  }
  double num_pinned() { return node_.scheduler->metrics()["pool_pinned_chunks"]; }

  const std::vector<std::int32_t> prompt_ = tokens(21);
  TestController controller_;
  std::shared_ptr<SimDevice> device_ = std::make_shared<SimDevice>(1);
  TestNode node_{controller_.endpoint(), "late", "toy", GetParam(), device_};
};

TEST_P(LateLoads, AreReportedInTheStepInWhichTheirBlocksAreGood) {
  begin_load();
  device_->run_all();
  node_.step();
  EXPECT_THAT(node_.finished_loads, ElementsAre(Pair("d", true)));
  EXPECT_FALSE(node_.scheduler->has_unreported_loads());
  EXPECT_EQ(num_pinned(), 0);
  node_.scheduler->allocated(RequestId{"d"}, 0, {kOtherBlocks});
  node_.step({{{RequestId{"d"}, 16, 5, BlockTable{kOtherBlocks}}}, {}},
             [&] { EXPECT_EQ(node_.wrong_tokens(kOtherBlocks, 0, 16, 1), 0u); });
  const FinishedRequest done = node_.scheduler->finished(RequestId{"d"}, 21, {kOtherBlocks}, false);
  ASSERT_EQ(done.admissions.size(), 1u);
  EXPECT_EQ(done.admissions[0].loaded, 16u);
}

TEST_P(LateLoads, OfARequestThatIsAbortedAreReportedToo) {
  begin_load();
  node_.scheduler->finished(RequestId{"d"}, 0, {kOtherBlocks}, true);
  node_.step();
  EXPECT_TRUE(node_.scheduler->has_unreported_loads()) << "the engine has to go on: the request keeps its blocks";
  EXPECT_THAT(node_.finished_loads, IsEmpty());
  device_->run_all();
  node_.step();
  EXPECT_THAT(node_.finished_loads, ElementsAre(Pair("d", true)));
  EXPECT_FALSE(node_.scheduler->has_unreported_loads());
  EXPECT_EQ(num_pinned(), 0);
}

TEST_P(LateLoads, OutlastAReset) {
  begin_load();
  node_.scheduler->reset_cache();
  node_.step();
  EXPECT_THAT(node_.finished_loads, IsEmpty());
  device_->run_all();
  node_.step();
  EXPECT_THAT(node_.finished_loads, ElementsAre(Pair("d", true)));
  EXPECT_EQ(num_pinned(), 0);
  node_.scheduler->finished(RequestId{"d"}, 0, {kOtherBlocks}, true);
  node_.scheduler->add_request(new_request("e", prompt_));
  EXPECT_EQ(node_.lookup("e"), 0u);
}

TEST_P(LateLoads, AreOverWhenTheNodeIsGone) {
  begin_load();
  node_.scheduler->shutdown();
  node_.worker->shutdown();
  node_.worker.reset();
  EXPECT_FALSE(device_->step()) << "work is left that may write into the engine's blocks";
  EXPECT_EQ(device_->num_alive(), 0u);
}

TEST_P(LateLoads, ThatTheForwardPassWouldHaveToWaitForAreRefused) {
  LoadJob job{"sync", 1, {kOtherBlocks}, {}};
  job.items.push_back({{0, 1}, {1}, 8, 0, 0, 8});
  ok_or_throw(node_.worker->begin_step(encode(StepPlan{100, {}, {job}, {}})));
  EXPECT_EQ(node_.worker->take_failed_blocks(), kOtherBlocks);
  EXPECT_THAT(node_.worker->take_finished_loads(), IsEmpty());
}

INSTANTIATE_TEST_SUITE_P(All, LateLoads, ::testing::Values("", R"(, "gpu_pool_bytes": "64KiB")"));

}  // namespace
}  // namespace kvferry
