// Tests which messages and commands each role of a member allows.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <type_traits>
#include <utility>
#include <variant>

#include "controller/directory/sessions.h"
#include "controller/protocol/wire.h"
#include "tests/controller/fixtures.h"

namespace kvferry::controller {
namespace {

using net::Role;
using ::testing::HasSubstr;

constexpr std::array kRoles = {Role::kReader, Role::kWorker, Role::kAdmin};
/// The least role for each message. A message that is not named here needs the role of a worker.
template <class Message>
constexpr Role kLeastRole = Role::kWorker;
template <>
constexpr Role kLeastRole<wire::Lookup> = Role::kReader;
template <>
constexpr Role kLeastRole<wire::StatusRequest> = Role::kReader;
template <>
constexpr Role kLeastRole<wire::AdminRequest> = Role::kAdmin;  // with an unknown verb

class RolesTest : public ::testing::Test, protected ReplySender {
 protected:
  bool send(ConnectionId, std::string_view bytes) override {
    answers_.push_back(wire::parse<wire::FromController>(bytes).value());
    return true;
  }
  template <class T>
  void say(ConnectionId from, const T& message, const net::Identity& sender) {
    answers_.clear();
    sessions_.receive(from, encode(message), now_, *this, sender);
  }
  std::uint64_t num_forbidden() const { return sessions_.counters().messages_forbidden; }
  std::string refusal() const {
    if (answers_.size() != 1) return "";
    if (const auto* reply = std::get_if<wire::AdminReply>(&answers_[0])) return reply->is_done ? "" : reply->text;
    const auto* refused = std::get_if<wire::Refused>(&answers_[0]);
    return refused == nullptr ? "" : refused->reason;
  }
  template <class Message>
  void check_message() {
    for (const Role role : kRoles) {
      const std::uint64_t before = num_forbidden();
      say(sessions_.open(), Message{}, {"m", role});
      const bool is_allowed = role >= kLeastRole<Message>;
      EXPECT_EQ(num_forbidden() == before, is_allowed)
          << "message " << Message{}.header.type << ", role " << net::name_of(role);
      if (is_allowed) continue;
      EXPECT_THAT(refusal(), HasSubstr(fmt::format("member 'm' (role {})", net::name_of(role))));
    }
  }
  template <class... Messages>
  void check_all(std::type_identity<std::variant<Messages...>>) {
    (check_message<Messages>(), ...);
  }

  Sessions sessions_{DirectoryOptions{}, 0};
  TimeNs now_ = kSecond;
  std::vector<wire::FromController> answers_;
};

TEST_F(RolesTest, EachMessageNeedsItsRole) {
  check_all(std::type_identity<wire::FromNode>());
  EXPECT_TRUE(sessions_.directory().nodes().empty());
}

TEST_F(RolesTest, EachCommandNeedsItsRole) {
  for (const auto& [verb, least] : {std::pair("pin", Role::kWorker),
                                    {"unpin", Role::kAdmin},
                                    {"drain", Role::kAdmin},
                                    {"undrain", Role::kAdmin},
                                    {"move", Role::kAdmin},
                                    {"clear", Role::kAdmin},
                                    {"purge", Role::kAdmin},
                                    {"quota", Role::kAdmin},
                                    {"", Role::kAdmin},
                                    {"pin ", Role::kAdmin}}) {
    for (const Role role : kRoles) {
      const std::uint64_t before = num_forbidden();
      say(sessions_.open(), wire::AdminRequest{.verb = verb}, {"m", role});
      EXPECT_EQ(num_forbidden() == before, role >= least) << verb << ", role " << net::name_of(role);
      if (role >= least) continue;
      EXPECT_THAT(refusal(), HasSubstr("needs a key of the role")) << verb;
    }
  }
}

TEST_F(RolesTest, AMemberRegistersOnlyNodesOfItsName) {
  const net::Identity member{"p-1", Role::kWorker};
  const auto hello = [](const std::string& name) { return wire::Hello{.node = node_info(name)}; };
  for (const char* foreign : {"p-10", "p-2", "q"}) {
    say(sessions_.open(), hello(foreign), member);
    EXPECT_THAT(refusal(), HasSubstr("its engine id must be 'p-1', or begin with 'p-1_' or 'p-1.'"));
  }
  EXPECT_TRUE(sessions_.directory().nodes().empty());
  for (const char* own : {"p-1", "p-1_dp0"}) {
    say(sessions_.open(), hello(own), member);
    EXPECT_EQ(refusal(), "");
  }
  EXPECT_EQ(sessions_.directory().nodes().size(), 2U);
  for (const NodeStatus& node : sessions_.directory().status(now_)) EXPECT_EQ(node.details.member, "p-1");
  EXPECT_EQ(sessions_.counters().nodes_refused, 3U);
}

TEST_F(RolesTest, ASenderOverItsShareKeepsItsLeasesAndGetsNothingLookedUpOrDone) {
  const net::Identity member{"p", Role::kWorker}, other{"q", Role::kWorker};
  const ConnectionId holder = sessions_.open(), asker = sessions_.open();
  say(holder, wire::Hello{.node = node_info("q")}, other);
  say(holder, wire::Publish{.incarnation = 1, .sequence = 0, .full = {keys_of(0, 1)}}, other);
  say(asker, wire::Hello{.node = node_info("p")}, member);
  const auto say_over_share = [&](const auto& message) {
    answers_.clear();
    sessions_.receive(asker, encode(message), now_, *this, member, true);
  };
  const wire::Lookup lookup{.incarnation = 1, .token = 7, .keys = {keys_of(0, 1)}};
  say_over_share(lookup);
  const auto& empty = std::get<wire::LookupReply>(answers_.at(0));
  EXPECT_EQ(empty.token, 7U);
  EXPECT_THAT(empty.holders, ::testing::IsEmpty());
  answers_.clear();
  say(asker, lookup, member);
  EXPECT_EQ(std::get<wire::LookupReply>(answers_.at(0)).holders.size(), 1U);

  say_over_share(wire::AdminRequest{.token = 8, .verb = "pin"});
  EXPECT_THAT(refusal(), HasSubstr("busy"));
  say_over_share(wire::StatusRequest{});
  EXPECT_TRUE(answers_.empty());
  say_over_share(wire::Publish{.incarnation = 1, .sequence = 0, .full = {keys_of(0, 2000)}});
  EXPECT_EQ(sessions_.directory().num_chunks(), 1U);
  say_over_share(wire::Heartbeat{.incarnation = 1, .next_sequence = 1});
  EXPECT_EQ(sessions_.counters().heartbeats, 1U);
  const Repair wanted = sessions_.directory().repair(sessions_.directory().find_node("", "p").value());
  EXPECT_EQ(wanted.resend_from, 0U) << "the dropped message is requested again";
  EXPECT_EQ(wanted.heard_below, 1U);
}

TEST_F(RolesTest, ARegistrationWithTooLowARoleIsARefusedNodeWithAReason) {
  const net::Identity reader{"monitor", Role::kReader};
  say(sessions_.open(), wire::Hello{.node = node_info("a")}, reader);
  const std::string why = refusal();
  EXPECT_THAT(why, HasSubstr("a node needs a key of the role worker"));
  EXPECT_EQ(sessions_.counters().nodes_refused, 1U);
  EXPECT_EQ(sessions_.status(now_).refusal, why);
  say(sessions_.open(), wire::Heartbeat{.incarnation = 1}, reader);
  EXPECT_EQ(sessions_.counters().nodes_refused, 1U) << "no registration";
  EXPECT_EQ(num_forbidden(), 2U);
}

TEST_F(RolesTest, AWorkerDrainsTheNodesThatItHasRegisteredAndNoOthers) {
  const net::Identity p{"p", Role::kWorker}, q{"q", Role::kWorker}, reader{"p", Role::kReader};
  const auto drain = [](const char* node, const char* name_space = "") {
    return wire::AdminRequest{.verb = "drain", .name_space = name_space, .engine_id = node};
  };
  say(sessions_.open(), wire::Hello{.node = node_info("p_1")}, p);
  say(sessions_.open(), wire::Hello{.node = node_info("q")}, q);
  say(sessions_.open(), wire::Hello{.node = node_info("p")}, {});  // of a holder of the cluster key, in p's name
  const auto leaving = [&] {
    std::vector<std::string> names;
    for (const NodeStatus& node : sessions_.status(now_).nodes)
      if (node.is_leaving) names.push_back(node.engine_id.value);
    return names;
  };
  for (const auto& [request, sender] : {std::pair(drain("q"), p),
                                        {drain("p"), p},
                                        {drain("p_2"), p},
                                        {drain("p_1", "other"), p},
                                        {drain(""), p},
                                        {drain("p_1"), q},
                                        {drain("p_1"), reader}}) {
    say(sessions_.open(), request, sender);
    EXPECT_THAT(refusal(), HasSubstr("the command 'drain' needs a key of the role"))
        << request.engine_id << " by " << sender.str();
  }
  EXPECT_EQ(num_forbidden(), 7U);
  EXPECT_THAT(leaving(), ::testing::IsEmpty());
  say(sessions_.open(), drain("p_1"), p);
  EXPECT_EQ(refusal(), "");
  EXPECT_THAT(leaving(), ::testing::ElementsAre("p_1"));
  for (const char* verb : {"undrain", "clear", "purge", "move"}) {
    say(sessions_.open(), wire::AdminRequest{.verb = verb, .engine_id = "p_1"}, p);
    EXPECT_THAT(refusal(), HasSubstr("needs a key of the role admin")) << verb;
  }
  EXPECT_THAT(leaving(), ::testing::ElementsAre("p_1"));
}

TEST_F(RolesTest, ARevokedMembersNodeIsRemovedAndNoOther) {
  const ConnectionId thief = sessions_.open(), honest = sessions_.open(), silent = sessions_.open();
  say(thief, wire::Hello{.node = node_info("thief")}, {"thief", Role::kWorker});
  say(honest, wire::Hello{.node = node_info("honest")}, {"honest", Role::kWorker});
  sessions_.revoke(thief, now_);
  sessions_.revoke(thief, now_);
  sessions_.revoke(silent, now_);
  EXPECT_EQ(num_forbidden(), 3U);
  EXPECT_EQ(sessions_.session(thief), nullptr);
  EXPECT_NE(sessions_.session(honest), nullptr);
  ASSERT_EQ(sessions_.directory().nodes().size(), 1U);
  EXPECT_EQ(sessions_.directory().nodes().begin()->second->engine_id.value, "honest");
}

}  // namespace
}  // namespace kvferry::controller
