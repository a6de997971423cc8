// Tests that a peer that floods the controller delays other peers by its share of a turn, and ends no lease.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>

#include "controller/protocol/stream_socket.h"
#include "controller/protocol/wire.h"
#include "controller/server/member_shares.h"
#include "controller/server/node_listeners.h"
#include "controller/server/turn_budget.h"
#include "tests/controller/live.h"
#include "tests/transport/base/net/members_folder.h"
#include "transport/base/net/zmq_socket.h"

namespace kvferry::controller {
namespace {

using ::testing::HasSubstr;

/// Goes on by `step` with each reading.
class SteppingClock final : public Clock {
 public:
  TimeNs now() const override { return now_ += step; }
  TimeNs step = 0;

 private:
  mutable TimeNs now_ = kSecond;
};

TEST(TurnBudget, EndsATurnAndAShareByMessages) {
  const SteppingClock clock;
  TurnBudget budget(clock);
  budget.begin_turn();
  for (std::size_t i = 0; i < kTurnMessagesMax; ++i) {
    if (i % kShareMessagesMax == 0) {
      EXPECT_EQ(budget.is_share_over(), i > 0);
      budget.begin_share();
    }
    EXPECT_FALSE(budget.is_share_over());
    EXPECT_FALSE(budget.is_turn_over());
    budget.count(1, 1);
  }
  EXPECT_TRUE(budget.is_share_over());
  EXPECT_TRUE(budget.is_turn_over());
  budget.begin_turn();
  EXPECT_FALSE(budget.is_share_over());
  EXPECT_FALSE(budget.is_turn_over());
}

TEST(TurnBudget, EndsATurnByBytes) {
  const SteppingClock clock;
  TurnBudget budget(clock);
  budget.begin_turn();
  budget.count(0, kTurnBytesMax - 1);
  EXPECT_FALSE(budget.is_turn_over());
  budget.count(0, 1);
  EXPECT_TRUE(budget.is_turn_over());
}

TEST(TurnBudget, EndsATurnAndAShareByTime) {
  SteppingClock clock;
  clock.step = kShareTimeMax / 2;
  TurnBudget budget(clock);
  budget.begin_turn();
  std::size_t num_shares = 0;
  for (; !budget.is_turn_over(); ++num_shares) {
    budget.begin_share();
    budget.count(1, 0);
    EXPECT_FALSE(budget.is_share_over());
    budget.count(1, 0);
    EXPECT_TRUE(budget.is_share_over());
    EXPECT_EQ(budget.share_used(), "2 messages in 2000 us");
  }
  EXPECT_EQ(num_shares, static_cast<std::size_t>(kTurnTimeMax / kShareTimeMax));
}

TEST(MemberShares, AnEmptyShareIsFullAgainInTheNextWindow) {
  MemberShares shares;
  const TimeNs begin = kSecond;
  EXPECT_FALSE(shares.is_used_up("a", begin));
  shares.add("a", kMemberTimeMax - 1, begin);
  EXPECT_FALSE(shares.is_used_up("a", begin));
  shares.add("a", 1, begin);
  EXPECT_TRUE(shares.is_used_up("a", begin + kMemberWindow - 1));
  EXPECT_FALSE(shares.is_used_up("b", begin));
  EXPECT_FALSE(shares.is_used_up("a", begin + kMemberWindow));
}

/// A peer of the stream listener that sends and reads without blocking.
class StreamPeer {
 public:
  explicit StreamPeer(const std::string& endpoint) : socket_(begin_connect(stream_address(endpoint)).value()) {}
  /// Sends as much as the socket takes.
  void flood(std::string_view bytes) {
    while (::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT) > 0) {
    }
  }
  void send(std::string_view message) {
    std::string bytes;
    append_frame(bytes, message);
    send_framed(bytes);
  }
  void send_framed(std::string_view bytes) {
    ASSERT_EQ(::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
  }
  bool has_answer() const {
    pollfd item{socket_.get(), POLLIN, 0};
    return ::poll(&item, 1, 0) == 1;
  }

 private:
  OwnedFd socket_;
};

std::string small_messages(std::size_t count) {
  std::string bytes;
  for (std::size_t i = 0; i < count; ++i) append_frame(bytes, "x");
  return bytes;
}

/// The stream listener and its sessions, whose turns the test runs. Over a Unix socket nothing is on the way: what was
/// sent can be read at once.
class StreamTurns : public ::testing::Test {
 protected:
  StreamPeer connected() {
    StreamPeer peer(listener_->address());
    listener_->serve(now_);
    return peer;
  }
  SteppingClock clock_;
  Sessions sessions_{{}, 0};
  std::unique_ptr<BoundListener> listener_ =
      listen_stream(fmt::format("unix:///tmp/kvferry-turns-{}", ::getpid()), sessions_, clock_).value();
  TimeNs now_ = kSecond;
};

TEST_F(StreamTurns, AConnectionThatAlwaysHasMoreDelaysNoOtherBeyondItsShare) {
  const std::string flood = small_messages(100'000);
  StreamPeer flooding = connected();
  StreamPeer node = connected();
  flooding.flood(flood);
  node.send(encode(wire::Hello{.node = node_info("a")}));
  const std::uint64_t before = sessions_.counters().messages_taken;
  EXPECT_TRUE(listener_->serve(now_)) << "the flood goes on";
  EXPECT_TRUE(node.has_answer()) << "in the first turn";
  EXPECT_LE(sessions_.counters().messages_taken - before, kTurnMessagesMax) << "lease checks come soon";
  EXPECT_EQ(sessions_.directory().num_nodes(), 1U);
  EXPECT_GT(sessions_.counters().peers_delayed, 0U);
  for (int turn = 0; turn < 100; ++turn) {
    flooding.flood(flood);
    const std::uint64_t beats = sessions_.counters().heartbeats;
    node.send(encode(wire::Heartbeat{.incarnation = 1, .next_sequence = 0}));
    listener_->serve(now_);
    ASSERT_EQ(sessions_.counters().heartbeats, beats + 1) << "turn " << turn;
  }
}

TEST_F(StreamTurns, MessagesThatTakeLongEndAShareEarly) {
  StreamPeer flooding = connected();
  StreamPeer node = connected();
  flooding.flood(small_messages(1000));
  node.send(encode(wire::Hello{.node = node_info("a")}));
  clock_.step = kTurnTimeMax / 4;
  const std::uint64_t before = sessions_.counters().messages_taken;
  EXPECT_TRUE(listener_->serve(now_));
  EXPECT_TRUE(node.has_answer());
  EXPECT_LE(sessions_.counters().messages_taken - before, 4U);
}

TEST_F(StreamTurns, AllThatAConnectionSentIsHandledInItsOrderAlsoIfItHasEnded) {
  constexpr std::uint32_t kSent = 2000;  // more than a turn takes
  {
    StreamPeer peer = connected();
    std::string all;  // sent at once: a Unix socket has no room for so many small pieces
    append_frame(all, encode(wire::Hello{.node = node_info("a")}));
    for (std::uint32_t i = 0; i < kSent; ++i)
      append_frame(all, encode(wire::Publish{.incarnation = 1, .sequence = i, .full = {keys_of(i, i + 1)}}));
    append_frame(all, encode(wire::Heartbeat{.incarnation = 1, .next_sequence = kSent}));
    peer.send_framed(all);
  }
  while (listener_->serve(now_)) {
  }
  EXPECT_EQ(sessions_.counters().heartbeats, 1U);
  EXPECT_EQ(sessions_.directory().num_chunks(), kSent) << "a message that comes too early would be dropped";
  EXPECT_EQ(sessions_.counters().peers_delayed, 0U) << "nobody waited";
}

TEST_F(StreamTurns, ALengthBeyondTheLimitAfterAShareIsRefusedTheSame) {
  StreamPeer peer = connected();
  std::string bytes = small_messages(kShareMessagesMax);
  bytes += "\xff\xff\xff\xff";
  ASSERT_EQ(bytes.size(), kShareMessagesMax * 5 + 4);
  peer.flood(bytes);
  while (listener_->serve(now_)) {
  }
  EXPECT_TRUE(peer.has_answer());
}

TEST(ZmqTurns, ATurnEndsByTime) {
  SteppingClock clock;
  Sessions sessions{{}, 0};
  const auto listener = listen_zmq("tcp://127.0.0.1:0", sessions, clock).value();
  const auto peer = net::ZmqSocket::make(std::make_shared<net::ZmqContext>(), net::ZmqKind::kDealer, {}).value();
  ASSERT_TRUE(peer->connect(listener->address()));
  constexpr std::uint64_t kMessages = 20;
  for (std::uint64_t i = 0; i < kMessages; ++i) ASSERT_TRUE(peer->send("x"));
  clock.step = kTurnTimeMax / 4;
  std::uint64_t taken = 0;
  const TimeNs deadline = steady_clock().now() + kDeadlineMs * kMillisecond;
  while (taken < kMessages && steady_clock().now() < deadline) {
    listener->serve(kSecond);
    EXPECT_LE(sessions.counters().messages_taken - taken, 4U);
    taken = sessions.counters().messages_taken;
  }
  EXPECT_EQ(taken, kMessages);
}

TEST(ZmqTurns, AMemberHasOneShareForAllOfItsConnections) {
  net::MembersFolder folder;
  const net::ClusterKey greedy = folder.add("w", net::Role::kWorker);
  const net::ClusterKey holding = folder.add("holder", net::Role::kWorker);
  const net::ClusterKey asking = folder.add("other", net::Role::kWorker);
  SteppingClock clock;
  Sessions sessions{{}, 0};
  const auto listener = listen_zmq("tcp://127.0.0.1:0", sessions, clock, folder.read("cluster")).value();
  const auto connected = [&](const net::ClusterKey& key, const std::string& name) {
    auto context = std::make_shared<net::ZmqContext>(net::ZmqContext::kSocketsMaxDefault, key);
    auto peer = net::ZmqSocket::make(std::move(context), net::ZmqKind::kDealer, {}).value();
    peer->set_linger(0);
    EXPECT_TRUE(peer->connect(listener->address()));
    EXPECT_TRUE(peer->send(encode(wire::Hello{.node = node_info(name)})));
    return peer;
  };
  const auto num_found = [](const std::string_view reply) {
    const auto parsed = wire::parse<wire::FromController>(reply).value();
    const auto* const found = std::get_if<wire::LookupReply>(&parsed);
    return found == nullptr ? std::nullopt : std::optional(found->holders.size());
  };
  const std::string lookup = encode(wire::Lookup{.incarnation = 1, .token = 7, .keys = {keys_of(0, 1)}});
  std::vector<std::unique_ptr<net::ZmqSocket>> flooding;
  for (const char* name : {"w_1", "w_2", "w_3"}) flooding.push_back(connected(greedy, name));
  const auto holder = connected(holding, "holder");
  ASSERT_TRUE(holder->send(encode(wire::Publish{.incarnation = 1, .sequence = 0, .full = {keys_of(0, 1)}})));
  const auto other = connected(asking, "other");
  clock.step = kMemberTimeMax / 10;
  const TimeNs deadline = steady_clock().now() + kDeadlineMs * kMillisecond;
  const auto serve_until = [&](const auto& reached) {
    while (!reached() && steady_clock().now() < deadline) listener->serve(kSecond);
    ASSERT_TRUE(reached());
  };
  serve_until([&] { return sessions.directory().num_nodes() == 5 && sessions.directory().num_chunks() == 1; });

  std::size_t num_empty = 0, num_others = 0;
  net::ZmqPart reply[1];
  ASSERT_TRUE(other->send(lookup));
  serve_until([&] {
    for (const auto& peer : flooding) {
      for (int i = 0; i < 16; ++i) (void)peer->send(lookup);
      while (peer->receive(reply) > 0) num_empty += num_found(reply[0].bytes()) == 0 ? 1 : 0;
    }
    while (other->receive(reply) > 0) {
      const auto found = num_found(reply[0].bytes());
      if (!found) continue;
      EXPECT_EQ(found, 1);
      ++num_others;
      (void)other->send(lookup);
    }
    return num_empty >= 20 && num_others >= 20;
  });
  EXPECT_GE(sessions.counters().peers_delayed, num_empty);
}

/// The number of connections of one peer that floods.
class ZmqFlood : public ::testing::TestWithParam<std::uint64_t> {};
INSTANTIATE_TEST_SUITE_P(Connections, ZmqFlood, ::testing::Values(1, 16, 64));

TEST_P(ZmqFlood, DelaysAMessageByOneOfEachOfItsConnections) {
  constexpr std::uint64_t kBeats = 20, kOfEach = 500;
  SteppingClock clock;
  Sessions sessions{{}, 0};
  const auto listener = listen_zmq("tcp://127.0.0.1:0", sessions, clock).value();
  const auto context = std::make_shared<net::ZmqContext>();
  const auto connected = [&] {
    auto peer = net::ZmqSocket::make(context, net::ZmqKind::kDealer, {}).value();
    EXPECT_TRUE(peer->connect(listener->address()));
    return peer;
  };
  std::vector<std::unique_ptr<net::ZmqSocket>> flooding(GetParam());
  for (auto& peer : flooding) {
    peer = connected();
    for (std::uint64_t i = 0; i < kOfEach; ++i) ASSERT_TRUE(peer->send("x"));
  }
  const auto node = connected();
  ASSERT_TRUE(node->send(encode(wire::Hello{.node = node_info("a")})));
  for (std::uint64_t i = 0; i < kBeats; ++i)
    ASSERT_TRUE(node->send(encode(wire::Heartbeat{.incarnation = 1, .next_sequence = 0})));
  clock.step = kTurnTimeMax;  // a turn takes one message
  const TimeNs deadline = steady_clock().now() + kDeadlineMs * kMillisecond;
  std::uint64_t most = 0;
  for (std::uint64_t beats = 0, taken = 0; beats < kBeats && steady_clock().now() < deadline;) {
    listener->serve(kSecond);
    if (sessions.counters().heartbeats == beats) continue;
    // The heartbeats wait together from the first one on: a peer's messages that came at once are in one queue.
    if (beats++ > 0) most = std::max(most, sessions.counters().messages_taken - taken);
    taken = sessions.counters().messages_taken;
  }
  EXPECT_EQ(sessions.counters().heartbeats, kBeats);
  EXPECT_LE(most, GetParam() + 1);
  RecordProperty("most_messages_before_one", static_cast<int>(most));
}

/// Floods a controller with the most expensive messages of a registered node, and with small ones of a peer that is
/// none, while another node sends heartbeats and lookups.
class Flood : public ::testing::TestWithParam<const char*> {
 protected:
  void flood_with_lookups() {
    LiveNode node(server_.endpoint(), node_info("flooding"), /*heartbeat_ms=*/50);
    LookupQuery query = ask_for(0, 1);
    query.keys.resize(wire::kKeysPerLookupMax, query.keys[0]);
    node.wait_for<Registered>();
    node.hold(full_chunks(0, 1));
    while (!is_over_) {
      node.turn(0);
      (void)node.client().lookup(query);
    }
  }
  LiveServer server_{GetParam(), /*lease_ms=*/1000};
  std::atomic<bool> is_over_{false};
};

INSTANTIATE_TEST_SUITE_P(Sockets, Flood, ::testing::Values("tcp://127.0.0.1:0", "stream://127.0.0.1:0"),
                         [](const auto& suite) { return std::string(suite.param).substr(0, 3); });

TEST_P(Flood, EndsNoLeaseAndLookupsAreAnswered) {
  LiveNode node(server_.endpoint(), node_info("a"), /*heartbeat_ms=*/50);
  ASSERT_TRUE(node.wait_for<Registered>());
  std::thread lookups([&] { flood_with_lookups(); });
  std::thread small([&] {
    const std::string bytes = small_messages(20'000);
    std::vector<StreamPeer> peers;
    for (int i = 0; is_stream(server_.endpoint()) && i < 4; ++i) peers.emplace_back(server_.endpoint());
    while (!is_over_ && !peers.empty()) {
      for (StreamPeer& peer : peers) peer.flood(bytes);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
  const TimeNs begun = steady_clock().now();
  TimeNs slowest = 0;
  while (steady_clock().now() - begun < 3 * kSecond) {
    const TimeNs asked = steady_clock().now();
    node.who_has(ask_for(0, 1));
    slowest = std::max(slowest, steady_clock().now() - asked);
  }
  is_over_ = true;
  lookups.join();
  small.join();
  RecordProperty("slowest_lookup_ms", static_cast<int>(slowest / kMillisecond));
  EXPECT_EQ(node.count<Lost>(), 0U);
  EXPECT_LT(slowest, kSecond) << "the lease, and the time after which a client gives a connection up";
  EXPECT_EQ(server_.status().counters.nodes_expired, 0U);
}

}  // namespace
}  // namespace kvferry::controller
