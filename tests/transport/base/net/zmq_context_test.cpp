// Tests who can talk to a ZeroMQ server with a cluster key: only members.
#include "transport/base/net/zmq_context.h"

#include <gmock/gmock.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>
#include <zmq.h>

#include <array>
#include <functional>
#include <memory>
#include <vector>

#include "tests/transport/base/net/key_file.h"
#include "transport/base/clock.h"
#include "transport/base/net/tcp_socket.h"
#include "transport/base/net/zmq_socket.h"

namespace kvferry::net {
namespace {

using Key = std::optional<ClusterKey>;
constexpr int kUnknownPeerWaitsMs = 300;  // a handshake takes about 1 ms

const Key kMemberKey = ClusterKey(std::string(64, 'm')), kOtherKey = ClusterKey(std::string(64, 'o')), kNoKey;

std::shared_ptr<ZmqContext> context_with(const Key& key) {
  return std::make_shared<ZmqContext>(ZmqContext::kSocketsMaxDefault, key);
}

bool wait_until(int limit_ms, const std::function<bool()>& reached) {
  const SteadyClock clock;
  const TimeNs deadline = clock.now() + limit_ms * kMillisecond;
  while (!reached()) {
    if (clock.now() > deadline) return false;
    ::usleep(2000);
  }
  return true;
}

/// A server that answers every message with its own bytes.
class EchoServer {
 public:
  explicit EchoServer(const Key& key, const std::string& endpoint = "tcp://127.0.0.1:0") {
    router_ = ZmqSocket::make(context_with(key), ZmqKind::kRouter).value();
    EXPECT_TRUE(router_->bind(endpoint));
  }
  const std::string& endpoint() const { return router_->endpoint(); }
  int num_messages() const { return num_messages_; }
  std::uint64_t num_refused() const { return router_->num_handshakes_failed(); }

  void turn() {
    std::array<ZmqPart, 2> parts;
    while (router_->receive(parts) > 0) {
      ++num_messages_;
      router_->send(std::array<std::string_view, 2>{parts[0].bytes(), parts[1].bytes()});
    }
  }

 private:
  std::unique_ptr<ZmqSocket> router_;
  int num_messages_ = 0;
};

/// Returns true if the server answers a client with this key within `limit_ms`.
bool is_answered(EchoServer& server, const Key& key, int limit_ms) {
  const auto client = ZmqSocket::make(context_with(key), ZmqKind::kDealer).value();
  EXPECT_TRUE(client->connect(server.endpoint()));
  EXPECT_TRUE(client->send("question"));
  ZmqPart answer;
  return wait_until(limit_ms, [&] {
    server.turn();
    return client->receive(std::span(&answer, 1)) == 1 && answer.bytes() == "question";
  });
}

TEST(ZmqContext, OnlyMembersGetThroughToAMember) {
  EchoServer server(kMemberKey);
  EXPECT_TRUE(is_answered(server, kMemberKey, 10'000));
  EXPECT_EQ(server.num_refused(), 0u);
  for (const Key& key : {kNoKey, kOtherKey}) {
    const std::uint64_t before = server.num_refused();
    EXPECT_FALSE(is_answered(server, key, kUnknownPeerWaitsMs)) << key.has_value();
    EXPECT_TRUE(wait_until(10'000, [&] { return server.turn(), server.num_refused() > before; }));
  }
  EXPECT_TRUE(is_answered(server, kMemberKey, 10'000)) << "unknown peers must not shut members out";
  EXPECT_EQ(server.num_messages(), 2);
}

TEST(ZmqContext, AMemberSendsNothingToAServerWithoutItsKey) {
  for (const Key& key : {kNoKey, kOtherKey}) {
    EchoServer server(key);
    EXPECT_FALSE(is_answered(server, kMemberKey, kUnknownPeerWaitsMs)) << key.has_value();
    EXPECT_EQ(server.num_messages(), 0);
  }
}

TEST(ZmqContext, SocketsThatDoNotLeaveTheHostStayOpen) {
  EchoServer server(kMemberKey, fmt::format("ipc://@kvferry-context-test-{}", ::getpid()));
  EXPECT_TRUE(is_answered(server, kNoKey, 10'000));
}

TEST(ZmqContext, KnowingTheServersPublicKeyIsNotEnough) {
  EchoServer server(kMemberKey);
  char secret[41] = "", server_public[41] = "", own_public[41] = "", own_secret[41] = "";
  const ClusterKey::Derived derived = kMemberKey->derived("kvferry CURVE 1");
  ::zmq_z85_encode(secret, derived.data(), derived.size());
  ASSERT_EQ(::zmq_curve_public(server_public, secret), 0);
  ASSERT_EQ(::zmq_curve_keypair(own_public, own_secret), 0);
  const auto context = context_with(kNoKey);
  void* const unknown_peer = ::zmq_socket(context->handle(), ZMQ_DEALER);
  constexpr int kNoLinger = 0;
  ::zmq_setsockopt(unknown_peer, ZMQ_LINGER, &kNoLinger, sizeof kNoLinger);
  ::zmq_setsockopt(unknown_peer, ZMQ_CURVE_SERVERKEY, server_public, sizeof server_public);
  ::zmq_setsockopt(unknown_peer, ZMQ_CURVE_PUBLICKEY, own_public, sizeof own_public);
  ::zmq_setsockopt(unknown_peer, ZMQ_CURVE_SECRETKEY, own_secret, sizeof own_secret);
  ASSERT_EQ(::zmq_connect(unknown_peer, server.endpoint().c_str()), 0);
  EXPECT_EQ(::zmq_send(unknown_peer, "question", 8, 0), 8);
  EXPECT_TRUE(wait_until(10'000, [&] { return server.turn(), server.num_refused() > 0; }));
  EXPECT_EQ(server.num_messages(), 0);
  ::zmq_close(unknown_peer);
}

/// Greetings of old versions of ZeroMQ's protocol, which had no security mechanisms. A message of one byte follows
/// each.
TEST(ZmqContext, OldProtocolsGetNoMessageThrough) {
  EchoServer server(kMemberKey);
  const HostPort address = address_of_endpoint(server.endpoint()).value();
  const std::string dealer(1, '\x05'), identity("\0\0", 2), message("\0\1x", 3);
  const std::string zmtp1 = std::string("\x01\x00", 2) + std::string("\x02\x00x", 3);
  const std::string zmtp2 = std::string("\xff\0\0\0\0\0\0\0\x01\x7f\x01", 11) + dealer + identity + message;
  for (const std::string& bytes : {zmtp1, zmtp2}) {
    const OwnedFd socket = connect_tcp(address).value();
    ASSERT_EQ(::send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
    wait_until(kUnknownPeerWaitsMs, [&] { return server.turn(), false; });
  }
  EXPECT_EQ(server.num_messages(), 0);
  EchoServer open(kNoKey);  // a server without a key accepts the same bytes as messages
  for (const std::string& bytes : {zmtp1, zmtp2}) {
    const OwnedFd socket = connect_tcp(address_of_endpoint(open.endpoint()).value()).value();
    ASSERT_EQ(::send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
    const int before = open.num_messages();
    EXPECT_TRUE(wait_until(10'000, [&] { return open.turn(), open.num_messages() > before; }));
  }
}

TEST(ZmqContext, TheEndOfAServerIsNotHeldUpByClientsThatGoAtThatMoment) {
  const std::string zmtp1 = std::string("\x01\x00", 2) + std::string("\x02\x00x", 3);
  for (int i = 0; i < 200; ++i) {
    const auto server = std::make_unique<EchoServer>(kNoKey);
    std::vector<OwnedFd> clients;
    for (int client = 0; client < 8; ++client) {
      clients.push_back(connect_tcp(address_of_endpoint(server->endpoint()).value()).value());
      ASSERT_EQ(::send(clients.back().get(), zmtp1.data(), zmtp1.size(), MSG_NOSIGNAL), std::ssize(zmtp1));
    }
    ASSERT_TRUE(wait_until(10'000, [&] { return server->turn(), server->num_messages() == 8; }));
  }  // the clients go first: ZeroMQ's thread tells the server's monitor of it while both end
}

/// Asks until there is an answer.
bool is_answered_soon(EchoServer& server, ZmqSocket& client) {
  static int num_asked = 0;
  ZmqPart answer;
  return reaches([&] {
    const std::string question = fmt::format("question {}", ++num_asked);
    client.send(question);
    return wait_until(100, [&] {
      server.turn();
      return client.receive(std::span(&answer, 1)) == 1 && answer.bytes() == question;
    });
  });
}

TEST(ZmqContext, AKeyIsReplacedStepByStepOnServersAndClientsInAnyOrder) {
  for (const bool is_server_first : {true, false}) {
    KeyFile server_file(::testing::TempDir(), kRotation[0]), client_file(::testing::TempDir(), kRotation[0]);
    EchoServer server(server_file.read());
    const Key client_key = client_file.read();
    const auto client = ZmqSocket::make(context_with(client_key), ZmqKind::kDealer).value();
    ASSERT_TRUE(client->connect(server.endpoint()));
    EXPECT_TRUE(is_answered_soon(server, *client));
    for (std::size_t step = 1; step < kRotation.size(); ++step) {
      for (KeyFile* const file :
           {is_server_first ? &server_file : &client_file, is_server_first ? &client_file : &server_file}) {
        const auto version = file == &client_file ? client_key->version() : 0;
        file->write(kRotation[step]);
        // The server follows its file while it answers; that it has read it shows at the end.
        EXPECT_TRUE(reaches([&] { return file != &client_file || client_key->version() != version; }));
        EXPECT_TRUE(is_answered_soon(server, *client)) << "step " << step;
        const auto late = ZmqSocket::make(context_with(client_file.read()), ZmqKind::kDealer).value();
        ASSERT_TRUE(late->connect(server.endpoint()));
        EXPECT_TRUE(is_answered_soon(server, *late)) << "step " << step;
      }
    }
    EXPECT_TRUE(reaches([&] { return !is_answered(server, ClusterKey(kOldKey), kUnknownPeerWaitsMs); }));
    EXPECT_TRUE(is_answered(server, ClusterKey(kNewKey), 10'000));
  }
}

TEST(ZmqContext, AServerEndsConnectionsWhoseKeyIsNotInUseAnyMore) {
  KeyFile file(::testing::TempDir(), {kOldKey});
  EchoServer server(file.read());
  const auto client = ZmqSocket::make(context_with(ClusterKey(kOldKey)), ZmqKind::kDealer).value();
  ASSERT_TRUE(client->connect(server.endpoint()));
  EXPECT_TRUE(is_answered_soon(server, *client));
  file.write({kNewKey});
  int num_messages = 0;
  EXPECT_TRUE(reaches([&] {
    num_messages = server.num_messages();
    client->send("question");
    return !wait_until(kUnknownPeerWaitsMs, [&] { return server.turn(), server.num_messages() > num_messages; });
  })) << "the connection has outlived its key";
}

TEST(ZmqContext, AClientLeavesAServerWhoseKeyIsNotAcceptedAnyMore) {
  KeyFile file(::testing::TempDir(), {kOldKey});
  EchoServer server{Key(ClusterKey(kOldKey))};
  const auto client = ZmqSocket::make(context_with(file.read()), ZmqKind::kDealer).value();
  ASSERT_TRUE(client->connect(server.endpoint()));
  EXPECT_TRUE(is_answered_soon(server, *client));
  file.write({kNewKey});
  ZmqPart answer;
  EXPECT_TRUE(reaches([&] {
    client->send("question");
    return !wait_until(kUnknownPeerWaitsMs, [&] {
      server.turn();
      return client->receive(std::span(&answer, 1)) == 1;
    });
  })) << "the connection has outlived its key";
}

}  // namespace
}  // namespace kvferry::net
