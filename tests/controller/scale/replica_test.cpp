// Tests a client of several controllers: each controller gets everything, lookups move on to another controller when
// one dies, and every lookup ends with an answer or an error.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <zmq.hpp>

#include "controller/protocol/wire.h"
#include "tests/controller/live.h"

namespace kvferry::controller {
namespace {

using ::testing::HasSubstr;

class Replicas : public ::testing::Test {
 protected:
  Replicas() {
    char path[] = "/tmp/kvferry_testXXXXXX";
    folder_ = ::mkdtemp(path);
    for (std::size_t i = 0; i < 2; ++i) start(i);
  }
  ~Replicas() override {
    for (auto& server : servers_) server.reset();
    std::filesystem::remove_all(folder_);
  }
  std::string endpoint(std::size_t i) const { return fmt::format("{}://{}/{}", i == 0 ? "unix" : "ipc", folder_, i); }
  std::string both() const { return endpoint(0) + "," + endpoint(1); }
  void start(std::size_t i) { servers_[i] = std::make_unique<LiveServer>(endpoint(i)); }
  bool both_know(LiveNode& node, std::uint64_t num_chunks) {
    return node.wait_until([&] {
      for (const auto& server : servers_) {
        std::uint64_t num_found = 0;
        for (const NodeStatus& known : server->status().nodes) num_found += known.num_chunks;
        if (num_found != num_chunks) return false;
      }
      return true;
    });
  }

  std::string folder_;
  std::array<std::unique_ptr<LiveServer>, 2> servers_;
};

TEST_F(Replicas, EachIsToldEverythingAndOneRegistrationIsReported) {
  LiveNode node(both(), node_info("a"));
  ASSERT_TRUE(node.wait_for<Registered>());
  node.hold(full_chunks(0, 3));
  EXPECT_TRUE(both_know(node, 3));
  EXPECT_EQ(node.count<Registered>(), 1U);
  node.client().evict(keys_of(0, 1));
  EXPECT_TRUE(both_know(node, 2));
}

TEST_F(Replicas, TheNextTakesOverAtOnceAndOneThatComesBackLearnsAll) {
  LiveNode holder(both(), node_info("holder"), /*heartbeat_ms=*/200);
  LiveNode asker(both(), node_info("asker"), 200);
  ASSERT_TRUE(holder.wait_for<Registered>());
  ASSERT_TRUE(asker.wait_for<Registered>());
  holder.hold(full_chunks(0, 3));
  ASSERT_TRUE(both_know(holder, 3));
  ASSERT_TRUE(asker.wait_until([&] { return servers_[1]->status().nodes.size() == 2; }));
  servers_[0].reset();
  EXPECT_TRUE(asker.wait_to_see(ask_for(0, 3), {"holder:3"}));
  EXPECT_EQ(asker.count<Lost>(), 0U) << "one is there still";
  start(0);
  ASSERT_TRUE(holder.wait_until([&] {
    asker.turn(0);
    const Status status = servers_[0]->status();
    return status.nodes.size() == 2 && status.nodes[1].num_chunks == 3;
  }));
  EXPECT_TRUE(both_know(holder, 3)) << "telling one again changed nothing at the other";
  servers_[1].reset();
  EXPECT_TRUE(asker.wait_to_see(ask_for(0, 3), {"holder:3"}));
  servers_[0].reset();
  EXPECT_TRUE(asker.wait_for<Lost>());
}

TEST_F(Replicas, ARefusalByAllIsFinal) {
  LiveNode first(both(), node_info("a"));
  ASSERT_TRUE(first.wait_until([&] { return servers_[1]->status().nodes.size() == 1; }));
  ASSERT_TRUE(first.wait_until([&] { return servers_[0]->status().nodes.size() == 1; }));
  LiveNode other(both(), node_info("b", 1, "", "model=b"));
  ASSERT_TRUE(other.wait_for<Refused>());
  EXPECT_THAT(other.last<Refused>().reason, HasSubstr("and 'b' there"));
  EXPECT_EQ(other.count<Lost>(), 0U);
}

TEST_F(Replicas, ALookupUnderWayWhenItsControllerDiesIsAnsweredByTheNext) {
  LiveNode holder(both(), node_info("holder"));
  ASSERT_TRUE(holder.wait_for<Registered>());
  holder.hold(full_chunks(0, 2));
  ASSERT_TRUE(both_know(holder, 2));
  // The first controller accepts every message, but answers only Hello, so that each lookup waits.
  zmq::context_t context;
  zmq::socket_t mute(context, zmq::socket_type::router);
  mute.set(zmq::sockopt::linger, 0);
  mute.bind("tcp://127.0.0.1:0");
  const auto client = make_client({.controller = mute.get(zmq::sockopt::last_endpoint) + "," + endpoint(1),
                                   .node = node_info("asker"),
                                   .heartbeat_ms = 100,
                                   .lost_after_ms = 500})
                          .value();
  std::uint64_t token = 0;
  std::vector<std::string> names;
  bool is_up = false;
  const TimeNs deadline = steady_clock().now() + kDeadlineMs * kMillisecond;
  while (names.empty() && steady_clock().now() < deadline) {
    zmq::message_t who, said;
    if (mute.recv(who, zmq::recv_flags::dontwait) && mute.recv(said)) {
      const wire::FromNode message = wire::parse<wire::FromNode>(said.to_string_view()).value();
      if (std::holds_alternative<wire::Hello>(message)) {
        mute.send(who, zmq::send_flags::sndmore);
        mute.send(zmq::buffer(encode(wire::Registered{.incarnation = 1})), zmq::send_flags::none);
        is_up = true;
      }
    }
    for (const ClientEvent& event : client->process(steady_clock().now())) {
      const auto* reply = std::get_if<LookupReply>(&event);
      if (reply == nullptr || reply->token != token) continue;
      for (const Holder& found : reply->holders) names.push_back(found.engine_id.value);
    }
    if (is_up && token == 0 && client->registered()) {
      const Result<std::uint64_t> asked = client->lookup(ask_for(0, 2));
      if (asked) token = *asked;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  EXPECT_EQ(names, std::vector<std::string>{"holder"});
}

TEST_F(Replicas, WithATimeoutALookupEndsInAnAnswerOrInAFailureAlsoWhereNobodyIs) {
  const auto client =
      make_client({.controller = endpoint(0), .node = node_info("a"), .lookup_timeout_ms = 300}).value();
  const std::uint64_t early = client->lookup(ask_for(0, 1)).value();  // the client is not registered yet
  servers_[1].reset();
  bool is_answered = false, has_failed = false;
  std::uint64_t late = 0;
  const TimeNs deadline = steady_clock().now() + kDeadlineMs * kMillisecond;
  while (!has_failed && steady_clock().now() < deadline) {
    for (const ClientEvent& event : client->process(steady_clock().now())) {
      if (const auto* reply = std::get_if<LookupReply>(&event)) is_answered = is_answered || reply->token == early;
      if (const auto* failed = std::get_if<LookupFailed>(&event)) {
        EXPECT_EQ(failed->token, late);
        EXPECT_THAT(failed->reason, HasSubstr("within 300 ms"));
        has_failed = true;
      }
    }
    if (is_answered && late == 0) {
      servers_[0].reset();
      late = client->lookup(ask_for(0, 1)).value();
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  EXPECT_TRUE(is_answered);
  EXPECT_TRUE(has_failed);
  ASSERT_FALSE(client->lookup({.keys = keys_of(0, 65'537), .tail_groups = {}, .exact_tails = {}}));
}

TEST(ReplicaList, EachMustBeAnEndpointAndThereOnce) {
  for (const char* list : {"tcp://h:1,", ",tcp://h:1", "tcp://h:1,nonsense", "tcp://h:1 , tcp://h:2"}) {
    const auto client = make_client({.controller = list, .node = node_info("a")});
    ASSERT_FALSE(client) << list;
    EXPECT_EQ(client.error().code, ErrorCode::kInvalidArgument);
  }
  const auto twice = make_client({.controller = "tcp://h:1,tcp://h:1", .node = node_info("a")});
  ASSERT_FALSE(twice);
  EXPECT_THAT(twice.error().what, HasSubstr("twice"));
}

}  // namespace
}  // namespace kvferry::controller
