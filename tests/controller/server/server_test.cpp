#include "controller/server/server.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <zmq.hpp>

#include "tests/controller/live.h"
#include "tests/transport/base/net/ipv6.h"

namespace kvferry::controller {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

/// Tests the contract between server and client over each kind of socket.
class OverSockets : public ::testing::TestWithParam<const char*> {
 protected:
  OverSockets() {
    const std::string kind = GetParam();
    if (kind == "ipc" || kind == "unix") {
      char path[] = "/tmp/kvferry_testXXXXXX";
      directory_ = ::mkdtemp(path);
      bind_ = kind + "://" + directory_ + "/socket";
    } else {
      bind_ = kind == "tcp6" ? "tcp://[::1]:0" : kind == "stream6" ? "stream://[::1]:0" : kind + "://127.0.0.1:0";
    }
  }
  void SetUp() override {
    if (bind_.find('[') != std::string::npos) SKIP_WITHOUT_IPV6();
    start();
  }
  ~OverSockets() override {
    server_.reset();
    if (!directory_.empty()) std::filesystem::remove_all(directory_);
  }
  void start(std::int64_t lease_ms = 600'000) { server_ = std::make_unique<LiveServer>(bind_, lease_ms); }
  /// Restarts the server at the same address, without any state.
  void restart(std::int64_t lease_ms = 600'000) {
    bind_ = server_->endpoint();
    server_.reset();
    start(lease_ms);
  }
  std::unique_ptr<LiveNode> registered(const NodeInfo& info) {
    auto node = std::make_unique<LiveNode>(server_->endpoint(), info);
    EXPECT_TRUE(node->wait_for<Registered>());
    return node;
  }

  std::string directory_;
  std::string bind_;
  std::unique_ptr<LiveServer> server_;
};

INSTANTIATE_TEST_SUITE_P(Sockets, OverSockets, ::testing::Values("tcp", "tcp6", "ipc", "stream", "stream6", "unix"),
                         [](const auto& suite) { return std::string(suite.param); });

TEST_P(OverSockets, ANodeRegistersAndIsToldOfOthersChunks) {
  const auto a = registered(node_info("a"));
  const auto b = registered(node_info("b", 9));
  EXPECT_EQ(a->count<SnapshotWanted>(), 1U);
  b->hold(full_chunks(0, 4));
  b->hold({tail_chunk(10, 50, 40)});
  ASSERT_TRUE(a->wait_to_see(ask_for(0, 6), {"b:4"}));
  ASSERT_TRUE(a->wait_until([&] {
    a->who_has({.keys = keys_of(0, 4),
                .tail_groups = {key_of(46), key_of(47), key_of(48), key_of(49), key_of(50)},
                .exact_tails = {}});
    return a->last<LookupReply>().holders[0].tails.size() == 1;
  }));
  const Holder holder = a->last<LookupReply>().holders[0];
  EXPECT_EQ(holder.incarnation.value, 9U);
  EXPECT_EQ(holder.endpoint, "tcp://10.0.0.1:1");
  EXPECT_EQ(holder.tails[0].key, key_of(10));
  EXPECT_EQ(holder.tails[0].num_tokens, 40U);
  b->client().evict({key_of(1)});
  EXPECT_TRUE(a->wait_to_see(ask_for(0, 6), {"b:1"}));
  EXPECT_THAT(b->who_has(ask_for(0, 6)), IsEmpty()) << "nobody is told of itself";
}

TEST_P(OverSockets, AnotherFingerprintIsRefusedForGood) {
  const auto a = registered(node_info("a"));
  LiveNode other(server_->endpoint(), node_info("b", 1, "", "model=b"));
  ASSERT_TRUE(other.wait_for<Refused>());
  EXPECT_THAT(other.last<Refused>().reason, HasSubstr("model is 'a' here"));
  EXPECT_THAT(other.last<Refused>().reason, HasSubstr("'b' there"));
  EXPECT_FALSE(other.client().registered());
  const auto waiting = make_client({.controller = server_->endpoint(), .node = node_info("b", 1, "", "model=b")});
  const Result<void> refused = wait_registered(**waiting, steady_clock(), kDeadlineMs);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kRefused);
  EXPECT_EQ(server_->status().nodes.size(), 1U);
}

TEST_P(OverSockets, NamespacesAreApart) {
  const auto a = registered(node_info("a", 1, "one"));
  const auto b = registered(node_info("b", 1, "two", "model=b"));
  const auto c = registered(node_info("c", 1, "two", "model=b"));
  a->hold(full_chunks(0, 3));
  b->hold(full_chunks(0, 2));
  EXPECT_TRUE(c->wait_to_see(ask_for(0, 3), {"b:2"}));
  EXPECT_THAT(a->who_has(ask_for(0, 3)), IsEmpty());
}

TEST_P(OverSockets, ASilentNodeExpiresAndComesBackByItself) {
  restart(/*lease_ms=*/500);
  const auto a = registered(node_info("a"));
  const auto b = registered(node_info("b"));
  b->hold(full_chunks(0, 2));
  const auto a_sees_b = [&] {
    b->turn(0);
    return a->who_has(ask_for(0, 2)) == std::vector<std::string>{"b:2"};
  };
  ASSERT_TRUE(a->wait_until(a_sees_b));
  ASSERT_TRUE(a->wait_to_see(ask_for(0, 2), {})) << "b's loop stands still";
  EXPECT_GE(server_->status().counters.nodes_expired, 1U);
  ASSERT_TRUE(b->wait_for<Registered>(2));
  EXPECT_GE(b->count<Lost>(), 1U);
  EXPECT_TRUE(a->wait_until(a_sees_b));
}

TEST_P(OverSockets, AControllerRestartedInPlaceLearnsAllAgain) {
  const auto a = registered(node_info("a"));
  const auto b = registered(node_info("b"));
  b->hold(full_chunks(0, 3));
  ASSERT_TRUE(a->wait_to_see(ask_for(0, 3), {"b:3"}));
  for (std::size_t i = 1; i <= 2; ++i) {
    restart();
    ASSERT_TRUE(b->wait_for<SnapshotWanted>(1 + i));
    ASSERT_TRUE(a->wait_for<Registered>(1 + i));
    EXPECT_TRUE(a->wait_to_see(ask_for(0, 3), {"b:3"}));
    EXPECT_EQ(b->count<Lost>(), b->count<Registered>() - 1) << "each registration but the first follows a loss";
  }
}

TEST_P(OverSockets, ANewerIncarnationFencesTheOlder) {
  const auto asker = registered(node_info("asker"));
  const auto old = registered(node_info("b", 1));
  old->hold(full_chunks(0, 3));
  ASSERT_TRUE(asker->wait_to_see(ask_for(0, 3), {"b:3"}));
  const auto fresh = registered(node_info("b", 2));
  EXPECT_THAT(asker->who_has(ask_for(0, 3)), IsEmpty()) << "no credit for the dead one's chunks";
  old->hold(full_chunks(0, 3));
  ASSERT_TRUE(old->wait_for<Refused>());
  EXPECT_THAT(old->last<Refused>().reason, HasSubstr("newer incarnation 2"));
  EXPECT_THAT(asker->who_has(ask_for(0, 3)), IsEmpty());
  fresh->hold(full_chunks(0, 1));
  EXPECT_TRUE(asker->wait_to_see(ask_for(0, 3), {"b:1"}));
  EXPECT_EQ(server_->status().counters.nodes_fenced, 1U);
}

TEST_P(OverSockets, ANodeThatStartsAgainAfterItsClockWentBackIsTakenInAtOnce) {
  const auto before = registered(node_info("b", 1000));
  ClientOptions options;
  options.controller = server_->endpoint();
  options.node = node_info("b", 400);
  const Result<std::unique_ptr<Client>> again = make_registered_client(options, steady_clock(), kDeadlineMs);
  ASSERT_TRUE(again) << again.error().what;
  EXPECT_TRUE((*again)->registered());
  EXPECT_EQ(options.node.incarnation, Incarnation{1001});
  ASSERT_TRUE(before->wait_for<Refused>()) << "the process of before can't come back";
}

TEST_P(OverSockets, AnotherProcessWithTheSameIncarnationIsRefused) {
  const auto node = registered(node_info("b", 1));
  NodeInfo forged = node_info("b", 1);
  forged.endpoint = "tcp://10.0.0.66:1";
  LiveNode unknown_peer(server_->endpoint(), forged);
  ASSERT_TRUE(unknown_peer.wait_for<Refused>());
  EXPECT_EQ(server_->status().nodes.at(0).endpoint, node_info("b").endpoint);
  EXPECT_EQ(server_->status().counters.nodes_refused, 1U);
}

TEST_P(OverSockets, ANodeThatLeavesIsDroppedAtOnce) {
  const auto a = registered(node_info("a"));
  auto b = registered(node_info("b"));
  b->hold(full_chunks(0, 2));
  ASSERT_TRUE(a->wait_to_see(ask_for(0, 2), {"b:2"}));
  b->client().leave();
  EXPECT_FALSE(b->client().registered());
  b.reset();
  EXPECT_TRUE(a->wait_to_see(ask_for(0, 2), {}));
}

TEST_P(OverSockets, ASnapshotOfManyMessagesArrivesWhole) {
  const auto a = registered(node_info("a"));
  const auto b = registered(node_info("b"));
  b->hold(full_chunks(0, 40'000));
  const auto all_arrived = [&] {
    return server_->status().nodes.size() == 2 && server_->status().nodes[1].num_chunks == 40'000;
  };
  ASSERT_TRUE(b->wait_until(all_arrived));
  restart();
  ASSERT_TRUE(b->wait_for<SnapshotWanted>(2));
  ASSERT_TRUE(a->wait_for<Registered>(2));
  ASSERT_TRUE(b->wait_until(all_arrived));
  EXPECT_THAT(a->who_has(ask_for(39'990, 40'001)), ElementsAre("b:10"));
}

TEST(ControllerClient, GivesUpASilentConnectionForANewOne) {
  zmq::context_t context;
  zmq::socket_t mute(context, zmq::socket_type::router);  // accepts every Hello and never answers
  mute.set(zmq::sockopt::linger, 0);
  mute.bind("tcp://127.0.0.1:0");
  LiveNode node(mute.get(zmq::sockopt::last_endpoint), node_info("a"));
  std::set<std::string> connections;
  EXPECT_TRUE(node.wait_until([&] {
    zmq::message_t connection, hello;
    if (mute.recv(connection, zmq::recv_flags::dontwait) && mute.recv(hello))
      connections.insert(connection.to_string());
    return connections.size() == 2;
  }));
  EXPECT_EQ(node.count<Lost>(), 0U) << "never registered, so nothing was lost";
}

TEST(ControllerClient, TellsOfLossAndKeepsTrying) {
  auto server = std::make_unique<LiveServer>("tcp://127.0.0.1:0");
  const std::string endpoint = server->endpoint();
  LiveNode node(endpoint, node_info("a"));
  ASSERT_TRUE(node.wait_for<Registered>());
  server.reset();
  ASSERT_TRUE(node.wait_for<Lost>());
  EXPECT_THAT(node.last<Lost>().reason, HasSubstr(endpoint));
  EXPECT_FALSE(node.client().registered());
  const Result<std::uint64_t> asked = node.client().lookup(ask_for(0, 1));
  ASSERT_FALSE(asked);
  EXPECT_EQ(asked.error().code, ErrorCode::kUnavailable);
  EXPECT_EQ(node.count<Lost>(), 1U);
  server = std::make_unique<LiveServer>(endpoint);
  EXPECT_TRUE(node.wait_for<Registered>(2));
}

TEST(ControllerClient, CallsBetweenPollsNeverHideAWaitingMessage) {
  // Sending on a ZeroMQ socket consumes the event of its descriptor. An owner that waits on fd() must not notice this.
  LiveServer server("tcp://127.0.0.1:0");
  LiveNode node(server.endpoint(), node_info("a"));
  ASSERT_TRUE(node.wait_for<Registered>());
  for (std::size_t i = 0; i < 200; ++i) {
    const std::size_t num_replies = node.count<LookupReply>();
    ASSERT_TRUE(node.client().lookup(ask_for(0, 1)));
    // the reply arrives while these messages are sent
    for (int k = 0; k < 50; ++k) node.client().publish(full_chunks(0, 1));
    pollfd item{node.client().fd(), POLLIN, 0};
    while (node.count<LookupReply>() == num_replies) {
      ASSERT_EQ(::poll(&item, 1, static_cast<int>(kDeadlineMs)), 1);
      node.turn(0);
    }
  }
}

TEST(ControllerClient, WaitingForNobodyNamesTheControllerAndEnds) {
  const auto client = make_client({.controller = "tcp://127.0.0.1:1", .node = node_info("a")});
  ASSERT_TRUE(client);
  const Result<void> waited = wait_registered(**client, steady_clock(), 100);
  ASSERT_FALSE(waited);
  EXPECT_EQ(waited.error().code, ErrorCode::kUnavailable);
  EXPECT_THAT(waited.error().what, HasSubstr("tcp://127.0.0.1:1"));
}

TEST(ControllerClient, RejectsWhatIsNotAnEndpoint) {
  for (const char* endpoint : {"", "127.0.0.1:14600", "tcp://127.0.0.1", "tcp://:1", "tcp://h:0", "tcp://h:65536",
                               "tcp://h:1x", "tcp://a b:1", "udp://h:1", "ipc://", "tcp://a:b:1", "stream://h",
                               "stream://h:0", "unix://", "unix://relative/path", "unix:///ends/"}) {
    const auto client = make_client({.controller = endpoint, .node = node_info("a")});
    ASSERT_FALSE(client) << endpoint;
    EXPECT_EQ(client.error().code, ErrorCode::kInvalidArgument);
    for (const char* allowed : {"tcp://HOST:PORT", "stream://HOST:PORT", "ipc://PATH", "unix:///ABSOLUTE/PATH"})
      EXPECT_THAT(client.error().what, HasSubstr(allowed));
  }
  EXPECT_TRUE(make_client({.controller = "tcp://[::1]:14600", .node = node_info("a")}));
  EXPECT_TRUE(make_client({.controller = "tcp://controller.kvferry.svc:14600", .node = node_info("a")}));
}

TEST(ControllerServer, APortInUseIsOneSentence) {
  LiveServer server("tcp://127.0.0.1:0");
  const auto second = Server::bind({.bind = server.endpoint(), .directory = {}}, steady_clock());
  ASSERT_FALSE(second);
  EXPECT_EQ(second.error().code, ErrorCode::kUnavailable);
  EXPECT_THAT(second.error().what, HasSubstr(server.endpoint()));
}

/// A listener that always has more to do. It counts its turns.
class BusyListener final : public Listener {
 public:
  explicit BusyListener(int* num_turns) : num_turns_(num_turns) {}
  int fd() const override { return -1; }
  bool serve(TimeNs) override { return ++*num_turns_ < 1000; }

 private:
  int* num_turns_;
};

TEST(ControllerServer, AFrontThatHasMoreIsNotWaitedForAndEachTurnEndsWithItsHooks) {
  const auto server = Server::bind({.bind = "tcp://127.0.0.1:0", .directory = {}}, steady_clock()).value();
  int num_turns = 0, num_ends = 0;
  ASSERT_TRUE(server->add_listener(std::make_unique<BusyListener>(&num_turns)));
  server->at_turn_end([&](TimeNs) {
    EXPECT_EQ(++num_ends, num_turns) << "after the fronts";
    if (num_ends == 1000) server->stop();
  });
  const TimeNs begun = steady_clock().now();
  server->run();
  EXPECT_EQ(num_ends, 1000);
  EXPECT_LT(steady_clock().now() - begun, 50 * kSecond) << "asleep between turns it would take 100 s";
}

TEST(ControllerServer, StatusCountsWhatHappened) {
  LiveServer server("tcp://127.0.0.1:0");
  LiveNode a(server.endpoint(), node_info("a", 3));
  LiveNode b(server.endpoint(), node_info("b"));
  ASSERT_TRUE(a.wait_for<Registered>());
  ASSERT_TRUE(b.wait_for<Registered>());
  b.hold(full_chunks(0, 5));
  ASSERT_TRUE(a.wait_to_see(ask_for(0, 5), {"b:5"}));
  const Status status = server.status();
  EXPECT_EQ(status.counters.nodes_registered, 2U);
  EXPECT_GE(status.counters.lookups, 1U);
  EXPECT_GE(status.counters.lookup_hits, 1U);
  EXPECT_EQ(status.counters.chunks_published, 5U);
  ASSERT_EQ(status.nodes.size(), 2U);
  EXPECT_EQ(status.nodes[0].incarnation.value, 3U);
  EXPECT_EQ(status.nodes[1].num_chunks, 5U);
}

}  // namespace
}  // namespace kvferry::controller
