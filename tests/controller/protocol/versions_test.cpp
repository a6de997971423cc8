// Tests a node and a controller of two releases, which speak different versions, and the exact messages of older
// releases.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "controller/client/client_session.h"
#include "controller/directory/sessions.h"
#include "controller/protocol/wire.h"
#include "tests/controller/fixtures.h"

namespace kvferry::controller {
namespace {

using ::testing::HasSubstr;
using ::testing::SizeIs;
using namespace std::string_literals;

/// A node and a controller that are connected directly.
class TwoReleases : protected ReplySender {
 public:
  TwoReleases(VersionRange node, VersionRange controller)
      : sessions_(DirectoryOptions{.wall_ms = [] { return std::int64_t{2000}; }}, 0, controller),
        connection_(sessions_.open()) {
    ClientOptions options;
    options.node = node_info("a", 5, "default");
    options.node.serves = "http://a:8000";
    options.node.details = {
        .host = "pod-a", .member = "somebody", .prepared_tokens_max = "4096", .conversion = "a to b"};
    options.protocol = node;
    options.wall_ms = [] { return std::int64_t{5000}; };
    client_.emplace(std::move(options), [this](std::string_view bytes) {
      versions_said_.push_back(wire::version_of(bytes));
      sessions_.receive(connection_, bytes, now_, *this);
      return true;
    });
  }
  std::vector<ClientEvent> turn() {
    now_ += kSecond;
    std::vector<ClientEvent> events;
    client_->send_due(now_);
    for (const std::string& bytes : std::exchange(answers_, {})) client_->receive(bytes, events);
    return events;
  }
  std::optional<std::string> refusal() {
    for (const ClientEvent& event : turn())
      if (const auto* refused = std::get_if<Refused>(&event)) return refused->reason;
    return std::nullopt;
  }

  std::optional<ClientSession> client_;
  Sessions sessions_;
  std::vector<std::uint32_t> versions_said_, versions_answered_;

 private:
  bool send(ConnectionId, std::string_view bytes) override {
    versions_answered_.push_back(wire::version_of(bytes));
    answers_.emplace_back(bytes);
    return true;
  }
  ConnectionId connection_;
  TimeNs now_ = 0;
  std::vector<std::string> answers_;
};

TEST(ControllerVersions, AllPairsOfRangesUseTheNewestCommonOneOrAreRefusedInASentence) {
  for (std::uint32_t a = 1; a < 5; ++a)
    for (std::uint32_t b = a; b < 5; ++b)
      for (std::uint32_t c = 1; c < 5; ++c)
        for (std::uint32_t d = c; d < 5; ++d) {
          TwoReleases both({a, b}, {c, d});
          const std::uint32_t common = std::min(b, d);
          const std::optional<std::string> refusal = both.refusal();
          if (common < a || common < c) {
            ASSERT_TRUE(refusal) << a << b << c << d;
            EXPECT_THAT(*refusal, HasSubstr(to_text({a, b})));
            EXPECT_THAT(*refusal, HasSubstr(to_text({c, d})));
            EXPECT_THAT(*refusal, HasSubstr("node 'a' (kvferry "));
            continue;
          }
          ASSERT_FALSE(refusal) << *refusal;
          EXPECT_EQ(both.versions_said_.front(), a) << "its Hello is one that older controllers read";
          EXPECT_TRUE(both.client_->is_registered());
          both.client_->publish(full_chunks(0, 3));
          both.client_->end_snapshot();
          ASSERT_TRUE(both.client_->lookup({keys_of(0, 2), {}, {}}));
          both.turn();
          for (std::size_t i = 1; i < both.versions_said_.size(); ++i) EXPECT_EQ(both.versions_said_[i], common);
          for (const std::uint32_t version : both.versions_answered_) EXPECT_EQ(version, common);
          EXPECT_GT(both.versions_answered_.size(), 2u);
          EXPECT_EQ(both.sessions_.directory().num_chunks(), 3u);
          EXPECT_EQ(both.sessions_.counters().messages_malformed, 0u);
        }
}

TEST(ControllerVersions, OrdersAreInTheVersionOfTheNode) {
  TwoReleases both({1, 2}, {2, 3});
  both.turn();
  both.client_->publish(full_chunks(0, 3));
  both.client_->end_snapshot();
  both.versions_answered_.clear();
  both.sessions_.execute({.verb = "clear", .name_space = "default"}, 2 * kSecond);
  both.turn();
  ASSERT_GT(both.versions_answered_.size(), 1u);
  for (const std::uint32_t version : both.versions_answered_) EXPECT_EQ(version, 2u);
}

TEST(ControllerVersions, APurgeIsAMessageOfATypeThatOlderNodesIgnore) {
  const std::string order = encode(wire::PurgeOrder{.incarnation = 5, .purge_id = 1, .giver = "h"});
  EXPECT_EQ(order, "\x94\x92\x01\x15\x05\x01\xa1h"s);
}

TEST(ControllerVersions, AReleaseOutOfReachOfAMessageIsRefusedWithBothVersions) {
  const auto parsed = wire::parse<wire::FromNode>(encode(wire::StatusRequest{.header = {9, 13}}), {2, 4});
  ASSERT_FALSE(parsed);
  EXPECT_EQ(parsed.error().code, ErrorCode::kRefused);
  EXPECT_THAT(parsed.error().what, HasSubstr("versions 2 to 4"));
  EXPECT_THAT(parsed.error().what, HasSubstr("version 9"));
}

// ---- the exact messages of the last release without version negotiation ----

const std::string kOldHello =
    "\x98\x92\x01\x01\xa7"
    "default\xa1"
    "a\x05\xa7kv_both\xa9tcp://h:1\xa7model=a\x00"s;
// The messages of the last release without NodeDetails.
const std::string kHelloWithoutDetails =
    "\x9d\x92\x01\x01\xa7"
    "default\xa1"
    "a\x05\xa7kv_both\xaatcp://h:22\xa7model=a\x00\xa8http://a\xa5"
    "0.1.0\x01\x01\xa4"
    "mine"s;
const std::string kOldHeartbeat = "\x94\x92\x01\x04\x05\x00\x90"s;
const std::string kOldRegistered = "\x94\x92\x01\x02\x05\xc3\x90"s;
const std::string kOldHeartbeatAck = "\x94\x92\x01\x05\x05\x00\x90"s;

class OldNode : public ::testing::Test, protected ReplySender {
 protected:
  bool send(ConnectionId, std::string_view bytes) override {
    answers_.emplace_back(bytes);
    return true;
  }
  std::string said(const std::string& bytes) {
    answers_.clear();
    sessions_.receive(connection_, bytes, kSecond, *this);
    return answers_.size() == 1 ? answers_[0] : fmt::format("{} answers", answers_.size());
  }
  Sessions sessions_{DirectoryOptions{.wall_ms = [] { return std::int64_t{2000}; }}, 0};
  ConnectionId connection_ = sessions_.open();
  std::vector<std::string> answers_;
};

TEST_F(OldNode, RegistersAndIsAnsweredAsBefore) {
  EXPECT_EQ(said(kOldHello), kOldRegistered);
  EXPECT_EQ(said(kOldHeartbeat), kOldHeartbeatAck);
  const auto nodes = sessions_.directory().status(kSecond);
  ASSERT_THAT(nodes, SizeIs(1));
  EXPECT_EQ(nodes[0].serves, "");
  EXPECT_EQ(nodes[0].version, "");
  EXPECT_EQ(nodes[0].load, 0u);
  EXPECT_EQ(nodes[0].clock_ahead_ms, 0) << "it does not tell its clock";
  for (const NodeDetail& detail : kNodeDetails) EXPECT_EQ(nodes[0].details.*detail.text, "") << detail.name;
}

TEST_F(OldNode, RegistersWithoutDetails) {
  EXPECT_EQ(said(kHelloWithoutDetails), kOldRegistered);
  const NodeStatus node = sessions_.directory().status(kSecond).at(0);
  EXPECT_EQ(node.version, "0.1.0");
  EXPECT_EQ(node.details.host, "");
  const auto read = wire::parse<wire::FromNode>(kHelloWithoutDetails);
  const std::string now = encode(std::get<wire::Hello>(read.value()));
  EXPECT_EQ(now.substr(1, kHelloWithoutDetails.size() - 1), kHelloWithoutDetails.substr(1)) << "the same, and more";
}

TEST_F(OldNode, IsRefusedByASuccessorThatDroppedItsVersion) {
  Sessions later(DirectoryOptions{}, 0, {2, 3});
  later.receive(later.open(), kOldHello, kSecond, *this);
  ASSERT_THAT(answers_, SizeIs(1));
  const auto refused = std::get<wire::Refused>(wire::parse<wire::FromController>(answers_[0]).value());
  EXPECT_THAT(refused.reason, HasSubstr("speaks versions 2 to 3"));
  EXPECT_THAT(refused.reason, HasSubstr("node 'a' (of an older kvferry) speaks version 1"));
}

TEST(OldController, AnswersANewNodeWhichThenSpeaksItsVersion) {
  std::vector<std::string> said;
  ClientOptions options;
  options.node = node_info("a", 5, "default");
  options.protocol = {1, 4};
  ClientSession client(std::move(options), [&](std::string_view bytes) {
    said.emplace_back(bytes);
    return true;
  });
  client.send_due(kSecond);
  ASSERT_THAT(said, SizeIs(1));
  EXPECT_EQ(said[0].substr(1, 3), "\x92\x01\x01") << "an old controller reads the header of its own version";
  std::vector<ClientEvent> events;
  client.receive(kOldRegistered, events);
  EXPECT_TRUE(client.is_registered());
  client.send_due(3 * kSecond);
  EXPECT_EQ(wire::version_of(said.back()), 1u);
}

// ---- the fields of the messages ----

TEST(NewFields, ReachTheStatus) {
  TwoReleases both({}, {});
  both.turn();
  both.client_->set_load(7);
  both.turn();
  const auto nodes = both.sessions_.directory().status(kSecond);
  ASSERT_THAT(nodes, SizeIs(1));
  EXPECT_EQ(nodes[0].serves, "http://a:8000");
  EXPECT_EQ(nodes[0].version, version());
  EXPECT_EQ(nodes[0].load, 7u);
  EXPECT_EQ(nodes[0].fingerprint, "model=a");
  EXPECT_EQ(nodes[0].details.host, "pod-a");
  EXPECT_EQ(nodes[0].details.member, "") << "only the controller says whose key the node has";
  EXPECT_EQ(nodes[0].details.prepared_tokens_max, "4096");
  EXPECT_EQ(nodes[0].details.conversion, "a to b");
  EXPECT_EQ(nodes[0].clock_ahead_ms, 3000);
  EXPECT_EQ(both.sessions_.status(kSecond).wall_ms, 2000);
}

TEST(NewFields, AChangedLoadIsToldWithinAFifthOfASecond) {
  int num_said = 0;
  ClientOptions options;
  options.node = node_info("a", 5);
  ClientSession client(std::move(options), [&](std::string_view) { return ++num_said > 0; });
  client.send_due(0);
  std::vector<ClientEvent> events;
  client.receive(encode(wire::Registered{.incarnation = 5}), events);
  client.send_due(500 * kMillisecond);
  num_said = 0;
  client.send_due(701 * kMillisecond);
  EXPECT_EQ(num_said, 0) << "nothing is new";
  client.set_load(2);
  client.send_due(702 * kMillisecond);
  EXPECT_EQ(num_said, 1);
  client.set_load(3);
  client.send_due(850 * kMillisecond);
  EXPECT_EQ(num_said, 1) << "not more often than that";
  client.send_due(905 * kMillisecond);
  EXPECT_EQ(num_said, 2);
}

TEST(NewFields, AnotherModelIsRefusedWithTheFieldAndBothValues) {
  Directory directory;
  ASSERT_TRUE(directory.join(node_info("a", 1, "", "model=x kv_dtype=bfloat16 layers=4"), 0, 0));
  const auto joined = directory.join(node_info("b", 1, "", "model=x kv_dtype=float32 layers=4"), 0, 0);
  ASSERT_FALSE(joined);
  EXPECT_EQ(joined.error().what,
            "node 'b' cannot join namespace '': kv_dtype (the KV cache's data type) is 'bfloat16' here and 'float32' "
            "there (\"here\" is the namespace, \"there\" is the node); use the same model and KV settings, or another "
            "namespace");
}

}  // namespace
}  // namespace kvferry::controller
