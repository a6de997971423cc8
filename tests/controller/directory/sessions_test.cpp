// Tests the protocol without sockets: which answer goes to whom, and what remains when a connection ends.
#include "controller/directory/sessions.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "controller/protocol/wire.h"
#include "tests/controller/fixtures.h"

namespace kvferry::controller {
namespace {

using ::testing::IsEmpty;
using ::testing::SizeIs;

class SessionsTest : public ::testing::Test, protected ReplySender {
 protected:
  bool send(ConnectionId to, std::string_view bytes) override {
    if (!does_read_) return false;
    answers_.emplace_back(to, wire::parse<wire::FromController>(bytes).value());
    return true;
  }
  template <class T>
  void say(ConnectionId from, const T& message) {
    sessions_.receive(from, encode(message), now_, *this);
  }
  static wire::Hello hello(const std::string& name, std::uint64_t incarnation = 1) {
    return {.node = node_info(name, incarnation)};
  }
  /// Returns the only answer of this kind to `to` since the last call.
  template <class T>
  T answer(ConnectionId to) {
    EXPECT_THAT(answers_, SizeIs(1));
    auto [at, message] = std::move(answers_.at(0));
    answers_.clear();
    EXPECT_EQ(at, to);
    return std::get<T>(std::move(message));
  }

  Sessions sessions_{DirectoryOptions{}, 0};
  TimeNs now_ = kSecond;
  bool does_read_ = true;
  std::vector<std::pair<ConnectionId, wire::FromController>> answers_;
};

TEST_F(SessionsTest, TheStatusHasTheReasonOfTheLastRefusal) {
  EXPECT_EQ(sessions_.status(now_).refusal, "");
  const ConnectionId connection = sessions_.open();
  say(connection, hello("a"));
  answers_.clear();
  wire::Hello other = hello("b");
  other.node.fingerprint += " layers=5";
  say(connection, other);
  const auto refused = answer<wire::Refused>(connection);
  const Status status = sessions_.status(now_ + 3 * kSecond);
  EXPECT_EQ(status.counters.nodes_refused, 1u);
  EXPECT_EQ(status.refusal, refused.reason);
  EXPECT_EQ(status.refusal_age_ms, 3000u);
  say(connection, hello("\x1b[2J" + std::string(5000, 'n')));
  const std::string shown = sessions_.status(now_).refusal;
  EXPECT_EQ(shown.find('\x1b'), std::string::npos) << "the text is printed on terminals";
  EXPECT_LE(shown.size(), 2048u);
  EXPECT_NE(shown, refused.reason);
}

class FakeObserver final : public SessionObserver {
 public:
  std::optional<std::string> refusal(const NodeInfo& info) const override {
    return info.incarnation.value < 5 ? std::optional<std::string>("too old") : std::nullopt;
  }
  Incarnation newest(const NodeInfo&) const override { return Incarnation{4711}; }
  void joined(NodeId, const NodeInfo& info, std::uint64_t next_sequence, TimeNs) override {
    heard.push_back(fmt::format("hello {} {}", info.engine_id, next_sequence));
  }
  void received(NodeId, std::uint64_t sequence, std::string_view message, TimeNs) override {
    heard.push_back(fmt::format("told {} {}", sequence, wire::parse<wire::FromNode>(message).value().index()));
  }
  void gone(NodeId, TimeNs) override { heard.emplace_back("gone"); }
  void executed(const wire::AdminRequest& request, TimeNs) override { heard.push_back(request.verb); }
  const std::vector<std::string>& replicas() const override { return list; }
  std::uint64_t replicas_version() const override { return version; }
  ScaleStatus status(TimeNs) const override { return {}; }

  std::vector<std::string> heard;
  std::vector<std::string> list = {"tcp://r0:1"};
  std::uint64_t version = 1;
};

TEST_F(SessionsTest, AnObserverReceivesAllAndDecidesWhoMayJoin) {
  FakeObserver observer;
  sessions_.set_observer(&observer);
  const ConnectionId connection = sessions_.open();
  say(connection, hello("a", 4));
  const auto refused = answer<wire::Refused>(connection);
  EXPECT_EQ(refused.reason, "too old");
  EXPECT_EQ(refused.newest_incarnation, 4711u) << "another replica knows of a newer one";
  EXPECT_THAT(observer.heard, IsEmpty());
  say(connection, hello("a", 5));
  answer<wire::Registered>(connection);
  say(connection, wire::Publish{.incarnation = 5, .begins_snapshot = true, .full = {keys_of(0, 3)}});
  say(connection, wire::Evict{.incarnation = 5, .sequence = 1, .keys = {keys_of(0, 1)}});
  const ConnectionId other = sessions_.open();
  say(other, hello("a", 6));
  answer<wire::Registered>(other);
  say(other, wire::Leave{.incarnation = 6});
  const std::size_t publish = wire::FromNode(wire::Publish{}).index(), evict = wire::FromNode(wire::Evict{}).index();
  EXPECT_THAT(observer.heard, ::testing::ElementsAre("hello a 0", fmt::format("told 0 {}", publish),
                                                     fmt::format("told 1 {}", evict), "gone", "hello a 0", "gone"));
  say(other, hello("b", 5));
  answer<wire::Registered>(other);
  sessions_.fence(*sessions_.directory().find_node("", "b"), now_);
  say(other, wire::Heartbeat{.incarnation = 5});
  answer<wire::Unregistered>(other);
  sessions_.set_observer(nullptr);
}

TEST_F(SessionsTest, NodesAreToldOfReplicasAtFirstAndWhenTheyChanged) {
  FakeObserver observer;
  sessions_.set_observer(&observer);
  const ConnectionId connection = sessions_.open();
  say(connection, hello("a", 5));
  EXPECT_EQ(answer<wire::Registered>(connection).replicas, observer.list);
  say(connection, wire::Heartbeat{.incarnation = 5});
  EXPECT_THAT(answer<wire::HeartbeatAck>(connection).replicas, IsEmpty());
  observer.list.emplace_back("tcp://r1:1");
  ++observer.version;
  say(connection, wire::Heartbeat{.incarnation = 5});
  EXPECT_EQ(answer<wire::HeartbeatAck>(connection).replicas, observer.list);
  say(connection, wire::Heartbeat{.incarnation = 5});
  EXPECT_THAT(answer<wire::HeartbeatAck>(connection).replicas, IsEmpty());
  sessions_.set_observer(nullptr);
}

TEST_F(SessionsTest, ANodeComesBackOnAnotherConnectionAndKeepsWhatItHeld) {
  const ConnectionId first = sessions_.open(), second = sessions_.open();
  say(first, hello("a"));
  EXPECT_TRUE(answer<wire::Registered>(first).snapshot_wanted);
  say(first, wire::Publish{.incarnation = 1, .begins_snapshot = true, .full = {keys_of(0, 3)}});
  sessions_.disconnected(first);
  EXPECT_EQ(sessions_.session(first), nullptr);
  say(second, wire::Heartbeat{.incarnation = 1, .next_sequence = 1});
  answer<wire::Unregistered>(second);
  wire::Hello again = hello("a");
  again.next_sequence = 1;
  say(second, again);
  EXPECT_FALSE(answer<wire::Registered>(second).snapshot_wanted);
  EXPECT_EQ(sessions_.status(now_).nodes.at(0).num_chunks, 3U);
  EXPECT_EQ(sessions_.counters().nodes_registered, 1U);
}

TEST_F(SessionsTest, AnUnknownPeerWhoKnowsTheIncarnationTakesNothingOver) {
  const ConnectionId node = sessions_.open(), unknown_peer = sessions_.open(), later = sessions_.open();
  wire::Hello own = hello("a", 7);
  own.node.serves = "http://10.0.0.1:8000";
  own.node.secret = "0123456789abcdef";
  say(node, own);
  answer<wire::Registered>(node);
  wire::Hello forged = own;
  forged.node.endpoint = "tcp://10.0.0.66:1";
  forged.node.serves = "http://10.0.0.66:8000";
  for (const char* secret : {"", "0123456789abcdee", "0123456789abcde", "0123456789abcdef0"}) {
    forged.node.secret = secret;
    say(unknown_peer, forged);
    EXPECT_THAT(answer<wire::Refused>(unknown_peer).reason, ::testing::HasSubstr("by another process"));
  }
  EXPECT_EQ(sessions_.counters().nodes_refused, 4U);
  EXPECT_EQ(sessions_.status(now_).nodes.at(0).endpoint, own.node.endpoint);
  EXPECT_EQ(sessions_.status(now_).nodes.at(0).serves, own.node.serves);
  EXPECT_EQ(sessions_.session(unknown_peer), nullptr);
  say(node, wire::Heartbeat{.incarnation = 7});
  answer<wire::HeartbeatAck>(node);
  say(later, own);
  answer<wire::Registered>(later);
  EXPECT_NE(sessions_.session(later), nullptr) << "the process itself comes back on another connection";
}

TEST_F(SessionsTest, NobodyIsToldASecret) {
  const ConnectionId node = sessions_.open();
  wire::Hello own = hello("a", 7);
  own.node.secret = "0123456789abcdef";
  say(node, own);
  answers_.clear();
  EXPECT_EQ(encode(wire::StatusReply{.status = sessions_.status(now_)}).find(own.node.secret), std::string::npos);
}

TEST_F(SessionsTest, AnOlderNodeHasNoSecretAndNobodyGivesItOne) {
  const ConnectionId first = sessions_.open(), unknown_peer = sessions_.open(), second = sessions_.open();
  say(first, hello("a", 7));
  answer<wire::Registered>(first);
  wire::Hello with_secret = hello("a", 7);
  with_secret.node.secret = "mine";
  say(unknown_peer, with_secret);
  answer<wire::Registered>(unknown_peer);
  say(second, hello("a", 7));
  answer<wire::Registered>(second);
}

TEST_F(SessionsTest, AnIncarnationOfTheFarFutureLocksNobodyOut) {
  DirectoryOptions options;
  options.newest_incarnation = [] { return std::uint64_t{1000}; };
  Sessions sessions(options, 0);
  const ConnectionId connection = sessions.open();
  const auto register_with = [&](std::uint64_t incarnation) {
    sessions.receive(connection, encode(hello("a", incarnation)), now_, *this);
  };
  for (const std::uint64_t incarnation : {~std::uint64_t{0}, std::uint64_t{1001}}) {
    register_with(incarnation);
    EXPECT_THAT(answer<wire::Refused>(connection).reason, ::testing::HasSubstr("ahead of this controller's clock"));
  }
  EXPECT_EQ(sessions.counters().nodes_refused, 2U);
  register_with(1000);
  answer<wire::Registered>(connection);
}

TEST_F(SessionsTest, AConnectionThatTurnsIntoAnotherNodeLeavesTheFirstToItsLease) {
  const ConnectionId connection = sessions_.open();
  say(connection, hello("a"));
  answer<wire::Registered>(connection);
  say(connection, hello("b"));
  answer<wire::Registered>(connection);
  say(connection, hello("a", 2));  // fences an incarnation that has no connection any more
  answer<wire::Registered>(connection);
  EXPECT_EQ(sessions_.num_sessions(), 1U);
  EXPECT_EQ(sessions_.counters().nodes_fenced, 1U);
  for (int i = 0; i < 10; ++i) {
    now_ += kSecond;
    say(connection, wire::Heartbeat{.incarnation = 2});
    sessions_.expire(now_);
  }
  ASSERT_THAT(sessions_.status(now_).nodes, SizeIs(1));
  EXPECT_EQ(sessions_.status(now_).nodes[0].engine_id.value, "a");
  EXPECT_EQ(sessions_.counters().nodes_expired, 1U);
}

TEST_F(SessionsTest, ANodeWhoseConnectionBrokeExpiresAndLeavesNothing) {
  const ConnectionId connection = sessions_.open();
  say(connection, hello("a"));
  sessions_.disconnected(connection);
  sessions_.disconnected(connection);
  sessions_.disconnected(sessions_.open());
  for (int i = 0; i < 10; ++i) sessions_.expire(now_ += kSecond);
  EXPECT_THAT(sessions_.status(now_).nodes, IsEmpty());
  EXPECT_EQ(sessions_.num_sessions(), 0U);
}

TEST_F(SessionsTest, AReportReachesTheStatusAndABadOneOnlyTheCounter) {
  const ConnectionId connection = sessions_.open();
  say(connection, hello("a"));
  answer<wire::Registered>(connection);
  EXPECT_EQ(sessions_.status(now_).nodes[0].report, nullptr);
  NodeReport report{.num_slots = 10, .num_chunks = 4};
  say(connection, wire::Heartbeat{.incarnation = 1, .report = encode(report)});
  answer<wire::HeartbeatAck>(connection);
  report.failures = {{"two\nlines", "", 0}};
  for (const std::string& bad : {std::string("garbage"), encode(report), std::string(100'000, '\x90')}) {
    say(connection, wire::Heartbeat{.incarnation = 1, .load = 7, .report = bad});
    answer<wire::HeartbeatAck>(connection);
  }
  now_ += 2 * kSecond;
  say(connection, wire::Heartbeat{.incarnation = 1, .load = 8});
  const Status status = sessions_.status(now_);
  ASSERT_NE(status.nodes[0].report, nullptr) << "the last good one stays";
  EXPECT_EQ(status.nodes[0].report->num_chunks, 4U);
  EXPECT_EQ(status.nodes[0].report_age_ms, 2000U);
  EXPECT_EQ(status.nodes[0].load, 8U);
  EXPECT_EQ(status.counters.reports_malformed, 3U);
  EXPECT_EQ(status.counters.messages_malformed, 0U);
}

TEST_F(SessionsTest, ANodeThatFellSilentIsLostUntilItIsBackOrTenMinutesHavePassed) {
  const ConnectionId a = sessions_.open(), b = sessions_.open(), c = sessions_.open();
  const auto lost = [&] {
    std::vector<std::string> names;
    for (const LostNode& one : sessions_.status(now_).lost) names.push_back(one.node.engine_id.value);
    return names;
  };
  for (const auto& [connection, name] : {std::pair(a, "a"), std::pair(b, "b"), std::pair(c, "c")}) {
    say(connection, hello(name));
    answer<wire::Registered>(connection);
  }
  say(a, wire::Heartbeat{.incarnation = 1, .report = encode(NodeReport{.num_failures = 3})});
  say(c, wire::Leave{.incarnation = 1});
  answers_.clear();
  for (int i = 0; i < 10; ++i) sessions_.expire(now_ += kSecond);
  EXPECT_THAT(lost(), ::testing::UnorderedElementsAre("a", "b")) << "c has left";
  say(b, hello("b"));
  EXPECT_THAT(lost(), ::testing::ElementsAre("a"));
  EXPECT_EQ(sessions_.status(now_).lost[0].node.report->num_failures, 3U);
  EXPECT_EQ(sessions_.status(now_).lost[0].lost_ago_ms, 7000U);
  now_ += 593 * kSecond;
  EXPECT_THAT(lost(), ::testing::ElementsAre("a"));
  now_ += kSecond;
  EXPECT_THAT(lost(), IsEmpty());
}

TEST_F(SessionsTest, AnswersThatDontGetOutAreCounted) {
  does_read_ = false;
  const ConnectionId connection = sessions_.open();
  say(connection, hello("a"));
  say(connection, wire::StatusRequest{});
  EXPECT_EQ(sessions_.counters().replies_dropped, 2U);
  EXPECT_EQ(sessions_.counters().messages_taken, 2U);
  EXPECT_EQ(sessions_.counters().messages_sent, 0U);
  does_read_ = true;
  say(connection, wire::StatusRequest{});
  say(connection, hello("a"));
  EXPECT_EQ(sessions_.counters().messages_taken, 4U);
  EXPECT_EQ(sessions_.counters().messages_sent, 2U);
  EXPECT_NE(sessions_.session(connection), nullptr) << "it may read the next one";
}

TEST_F(SessionsTest, UnknownPeersAreToldWhatToSayAndChangeNothing) {
  const ConnectionId connection = sessions_.open();
  say(connection, wire::Lookup{.incarnation = 7, .keys = {keys_of(0, 2)}});
  EXPECT_EQ(answer<wire::Unregistered>(connection).incarnation, 7U);
  say(connection, wire::Publish{.incarnation = 7, .full = {keys_of(0, 2)}});
  say(connection, wire::Leave{.incarnation = 7});
  say(connection, wire::Registered{});
  EXPECT_THAT(answers_, IsEmpty());
  EXPECT_EQ(sessions_.counters().messages_unregistered, 3U);
  EXPECT_EQ(sessions_.counters().messages_malformed, 1U);
}

}  // namespace
}  // namespace kvferry::controller
