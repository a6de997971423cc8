// Tests a controller with a cluster key: members work as without a key, and other peers get no answer.
#include <gmock/gmock.h>

#include "controller/api/status.h"
#include "controller/client/client_link.h"
#include "tests/controller/live.h"
#include "transport/base/net/host_port.h"
#include "transport/base/net/tcp_socket.h"

namespace kvferry::controller {
namespace {

using ::testing::HasSubstr;
using Key = std::optional<net::ClusterKey>;
constexpr std::int64_t kUnknownPeerWaitsMs = 300;

const Key kOurKey = net::ClusterKey(std::string(64, 'm')), kForeignKey = net::ClusterKey(std::string(64, 'o'));

std::string refusal_of(const std::string& endpoint, const Key& key) {
  const auto status = fetch_status(endpoint, kUnknownPeerWaitsMs, key);
  return status ? "" : status.error().what;
}

TEST(ControllerKey, MembersRegisterPublishAndLookup) {
  LiveServer server("tcp://127.0.0.1:0", 600'000, kOurKey);
  LiveNode a(server.endpoint(), node_info("a"), 50, kOurKey), b(server.endpoint(), node_info("b"), 50, kOurKey);
  ASSERT_TRUE(a.wait_for<Registered>());
  ASSERT_TRUE(b.wait_for<Registered>());
  a.hold(full_chunks(0, 3));
  EXPECT_TRUE(a.wait_until([&] {
    b.turn(0);
    return server.status().nodes.front().num_chunks == 3;
  }));
  EXPECT_TRUE(b.wait_to_see(ask_for(0, 3), {"a:3"}));
  EXPECT_EQ(server.status().counters.handshakes_refused, 0U);
}

TEST(ControllerKey, UnknownPeersGetNoAnswerAndAreCounted) {
  LiveServer server("tcp://127.0.0.1:0", 600'000, kOurKey);
  const std::uint64_t before = server.status().counters.messages_taken;
  EXPECT_THAT(refusal_of(server.endpoint(), {}),
              HasSubstr("this process has no cluster key: if the controller has one"));
  EXPECT_THAT(refusal_of(server.endpoint(), kForeignKey),
              HasSubstr("this process has a cluster key: the controller must have the same key"));
  const auto probe = net::connect_tcp(net::address_of_endpoint(server.endpoint()).value());
  ASSERT_TRUE(probe);
  const Counters counters = server.status().counters;
  EXPECT_EQ(counters.messages_taken, before + 1) << "the members' requests alone";
  EXPECT_EQ(counters.messages_malformed, 0U);
  EXPECT_GE(counters.handshakes_refused, 2U);
}

TEST(ControllerKey, AMemberDoesNotSpeakToAControllerWithoutTheKey) {
  LiveServer server("tcp://127.0.0.1:0");
  EXPECT_THAT(refusal_of(server.endpoint(), kOurKey),
              HasSubstr("this process has a cluster key: the controller must have"));
  EXPECT_EQ(server.status().counters.messages_taken, 1U) << "that of this line alone";
}

TEST(ControllerKey, ALinkSharesOnlyAContextOfItsOwnKey) {
  struct Row {
    Key context, link;
    const char* refusal;
  };
  const Row rows[] = {
      {{}, {}, ""},
      {kOurKey, kOurKey, ""},
      {kForeignKey, kOurKey,
       "is to use a cluster key, but the ZeroMQ context that it shares with others uses another one; both need"},
      {{},
       kOurKey,
       "is to use a cluster key, but the ZeroMQ context that it shares with others uses none; both need the same"},
      {kOurKey,
       {},
       "is to use no cluster key, but the ZeroMQ context that it shares with others uses one; both need the same"}};
  for (const Row& row : rows) {
    const auto context = std::make_shared<net::ZmqContext>(net::ZmqContext::kSocketsMaxDefault, row.context);
    const auto link = make_link("tcp://127.0.0.1:1", {.zmq_context = context, .cluster_key = row.link});
    EXPECT_EQ(static_cast<bool>(link), *row.refusal == '\0');
    if (link) continue;
    EXPECT_EQ(link.error().code, ErrorCode::kInvalidArgument);
    EXPECT_THAT(link.error().what, HasSubstr(row.refusal));
  }
}

TEST(ControllerKey, StreamsOverTcpAreRefusedOnBothSides) {
  ServerOptions options;
  options.bind = "tcp://127.0.0.1:0";
  options.stream = "stream://127.0.0.1:0";
  options.cluster_key = kOurKey;
  const auto server = Server::bind(options, steady_clock());
  ASSERT_FALSE(server);
  EXPECT_THAT(server.error().what, HasSubstr("'stream://127.0.0.1:0' is neither encrypted nor authenticated"));
  ClientOptions client{.controller = "tcp://h:1,stream://h:2", .node = node_info("a")};
  client.cluster_key = kOurKey;
  const auto made = make_client(client);
  ASSERT_FALSE(made);
  EXPECT_THAT(made.error().what, HasSubstr("'stream://h:2' is neither encrypted nor authenticated"));
}

TEST(ControllerKey, AClientThatCantRegisterSaysWhatTheKeyHasToDoWithIt) {
  LiveServer server("tcp://127.0.0.1:0", 600'000, kOurKey);
  const auto client = make_client({.controller = server.endpoint(), .node = node_info("a")}).value();
  const Result<void> waited = wait_registered(*client, steady_clock(), kUnknownPeerWaitsMs);
  ASSERT_FALSE(waited);
  EXPECT_THAT(waited.error().what, HasSubstr("this process has no cluster key: if the controller has one"));
}

}  // namespace
}  // namespace kvferry::controller
