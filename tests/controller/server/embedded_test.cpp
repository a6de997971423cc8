// The controller in this process: the same promises as over sockets.
#include "controller/server/embedded.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/controller/live.h"

namespace kvferry::controller {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

class Embedded : public ::testing::Test {
 protected:
  void start(std::int64_t lease_ms = 600'000) {
    controller_ = EmbeddedController::make({.lease_ms = lease_ms, .grace_ms = lease_ms / 3}, steady_clock());
  }
  std::unique_ptr<LiveNode> registered(const NodeInfo& info) {
    auto node = std::make_unique<LiveNode>(
        controller_->connect({.controller = "embedded", .node = info, .heartbeat_ms = 50, .lost_after_ms = 1000}));
    EXPECT_TRUE(node->wait_for<Registered>());
    return node;
  }
  std::shared_ptr<EmbeddedController> controller_;
};

TEST_F(Embedded, NodesAreToldOfEachOthersChunks) {
  start();
  const auto a = registered(node_info("a"));
  const auto b = registered(node_info("b"));
  EXPECT_EQ(b->count<SnapshotWanted>(), 1U);
  b->hold(full_chunks(0, 40'000));  // several messages
  EXPECT_EQ(a->who_has(ask_for(39'990, 40'001)), std::vector<std::string>{"b:10"}) << "at once";
  b->client().evict(keys_of(39'991, 39'992));
  EXPECT_EQ(a->who_has(ask_for(39'990, 40'001)), std::vector<std::string>{"b:1"});
  EXPECT_THAT(b->who_has(ask_for(0, 6)), IsEmpty()) << "nobody is told of itself";
  EXPECT_EQ(controller_->status().nodes.at(1).num_chunks, 39'999U);
}

TEST_F(Embedded, AnAnswerWaitsBehindTheDescriptor) {
  start();
  const auto a = registered(node_info("a"));
  while (!a->client().process(steady_clock().now()).empty()) {
  }
  pollfd item{a->client().fd(), POLLIN, 0};
  EXPECT_EQ(::poll(&item, 1, 0), 0);
  const std::uint64_t first = a->client().lookup(ask_for(0, 1)).value();
  const std::uint64_t second = a->client().lookup(ask_for(0, 1)).value();
  EXPECT_EQ(::poll(&item, 1, 0), 1);
  const auto events = a->client().process(steady_clock().now());
  ASSERT_EQ(events.size(), 2U);
  EXPECT_EQ(std::get<LookupReply>(events[0]).token, first);
  EXPECT_EQ(std::get<LookupReply>(events[1]).token, second);
}

TEST_F(Embedded, ASilentNodeExpiresAndComesBackByItself) {
  start(/*lease_ms=*/500);
  const auto a = registered(node_info("a"));
  const auto b = registered(node_info("b"));
  b->hold(full_chunks(0, 2));
  ASSERT_TRUE(a->wait_to_see(ask_for(0, 2), {"b:2"}));
  ASSERT_TRUE(a->wait_to_see(ask_for(0, 2), {})) << "b's loop stands still";
  ASSERT_TRUE(b->wait_for<Registered>(2));
  EXPECT_TRUE(a->wait_until([&] {
    b->turn(0);
    return a->who_has(ask_for(0, 2)) == std::vector<std::string>{"b:2"};
  }));
}

TEST_F(Embedded, WhoLeavesIsForgottenAndFingerprintsMustAgree) {
  start();
  const auto a = registered(node_info("a"));
  auto b = registered(node_info("b"));
  b->hold(full_chunks(0, 2));
  b->client().leave();
  b.reset();
  EXPECT_THAT(a->who_has(ask_for(0, 2)), IsEmpty());
  LiveNode other(controller_->connect({.node = node_info("b", 2, "", "model=b")}));
  ASSERT_TRUE(other.wait_for<Refused>());
  EXPECT_THAT(other.last<Refused>().reason, HasSubstr("and 'b' there"));
}

TEST_F(Embedded, ThreadsMayEachHaveANode) {
  start();
  std::vector<std::thread> threads;
  for (std::uint32_t i = 0; i < 4; ++i) {
    threads.emplace_back([this, i] {
      const auto node = registered(node_info(fmt::format("n{}", i)));
      for (std::uint32_t round = 0; round < 200; ++round) {
        node->hold(full_chunks(100 * round, 100 * round + 10));
        node->who_has(ask_for(0, 10));
      }
    });
  }
  controller_->status();
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(controller_->status().counters.nodes_registered, 4U);
  EXPECT_EQ(controller_->status().counters.chunks_published, 4U * 200 * 10);
}

}  // namespace
}  // namespace kvferry::controller
