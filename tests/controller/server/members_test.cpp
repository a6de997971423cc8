// Tests a controller whose members have keys of their own, over real connections.
#include <gmock/gmock.h>

#include "controller/api/admin_command.h"
#include "controller/api/status.h"
#include "tests/controller/live.h"
#include "tests/transport/base/net/members_folder.h"

namespace kvferry::controller {
namespace {

using net::Role;
using ::testing::HasSubstr;
constexpr std::int64_t kRefusedWithinMs = 500, kHeartbeatMs = 100;

class ControllerMembers : public ::testing::Test {
 protected:
  net::MembersFolder folder_;
  const net::ClusterKey reader_ = folder_.add("r", Role::kReader), worker_ = folder_.add("w", Role::kWorker);
  const net::ClusterKey admin_ = folder_.add("a", Role::kAdmin);
  LiveServer server_{"tcp://127.0.0.1:0", 600'000, folder_.read("cluster")};

  std::string clear_with(const net::ClusterKey& key) {
    const auto done = run_admin_command(server_.endpoint(), {.verb = "clear"}, kDeadlineMs, key);
    return done ? "" : done.error().what;
  }
};

TEST_F(ControllerMembers, EachRoleDoesWhatItMay) {
  LiveNode node(server_.endpoint(), node_info("w_1"), kHeartbeatMs, worker_);
  ASSERT_TRUE(node.wait_for<Registered>());
  for (const net::ClusterKey& key : {reader_, worker_, admin_})
    EXPECT_EQ(fetch_status(server_.endpoint(), kDeadlineMs, key).value().nodes.size(), 1U);
  EXPECT_EQ(
      clear_with(reader_),
      "the command 'clear' needs a key of the role admin, but the sender has the key of member 'r' (role reader)");
  EXPECT_THAT(clear_with(worker_), HasSubstr("the sender has the key of member 'w' (role worker)"));
  EXPECT_EQ(clear_with(admin_), "");
  EXPECT_EQ(clear_with(folder_.read("cluster")), "");
  EXPECT_EQ(server_.status().counters.messages_forbidden, 2U);
  const auto as_node = make_client({.controller = server_.endpoint(), .node = node_info("r"), .cluster_key = reader_});
  const Result<void> registered = wait_registered(**as_node, steady_clock(), kDeadlineMs);
  EXPECT_THAT(
      registered.error().what,
      HasSubstr("a node needs a key of the role worker, but the sender has the key of member 'r' (role reader)"));
}

TEST_F(ControllerMembers, AWorkerDrainsItsOwnNodeAndNoOther) {
  const net::ClusterKey other = folder_.add("other", Role::kWorker);
  LiveNode node(server_.endpoint(), node_info("w_1"), kHeartbeatMs, worker_);
  ASSERT_TRUE(node.wait_for<Registered>());
  const auto drain_with = [&](const net::ClusterKey& key) {
    return run_admin_command(server_.endpoint(), {.verb = "drain", .engine_id = "w_1"}, kDeadlineMs, key);
  };
  const auto is_leaving = [&] { return server_.status().nodes.at(0).is_leaving; };
  for (const net::ClusterKey& key : {reader_, other}) EXPECT_FALSE(drain_with(key));
  EXPECT_THAT(drain_with(other).error().what, HasSubstr("the sender has the key of member 'other' (role worker)"));
  EXPECT_FALSE(is_leaving());
  EXPECT_EQ(drain_with(worker_).value().text, "node 'w_1' is being drained");
  EXPECT_TRUE(is_leaving());
}

TEST_F(ControllerMembers, ARevokedNodeIsOutWithinASecond) {
  (void)folder_.add("thief", Role::kWorker);
  LiveNode honest(server_.endpoint(), node_info("w"), kHeartbeatMs, worker_);
  const auto both = [&] { return server_.status().nodes.size() == 2; };
  ASSERT_TRUE(honest.wait_for<Registered>());
  LiveNode thief(server_.endpoint(), node_info("thief"), kHeartbeatMs, folder_.read("thief"));
  ASSERT_TRUE(thief.wait_for<Registered>());
  EXPECT_TRUE(both());
  folder_.revoke("thief");
  const TimeNs until = steady_clock().now() + kSecond;
  while (steady_clock().now() < until) {
    thief.turn();
    honest.turn();
  }
  const std::vector<NodeStatus> left = server_.status().nodes;
  ASSERT_EQ(left.size(), 1U);
  EXPECT_EQ(left[0].engine_id.value, "w");
  EXPECT_GE(server_.status().counters.messages_forbidden, 1U);
  EXPECT_FALSE(fetch_status(server_.endpoint(), kRefusedWithinMs, folder_.read("thief")));
  EXPECT_TRUE(honest.client().registered());
  EXPECT_EQ(server_.status().counters.nodes_registered, 2U) << "the others' connections have stayed";
}

}  // namespace
}  // namespace kvferry::controller
