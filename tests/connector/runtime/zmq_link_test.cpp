#include "connector/runtime/links/zmq_link.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <unistd.h>

#include "tests/transport/base/net/ipv6.h"
#include "tests/transport/base/net/key_file.h"
#include "tests/transport/base/net/members_folder.h"
#include "transport/base/clock.h"
#include "transport/base/net/zmq_context.h"
#include "transport/base/printable.h"

namespace kvferry {
namespace {

template <class Socket>
auto wait_for(Socket& socket) {
  const SteadyClock clock;
  const TimeNs deadline = clock.now() + 10 * kSecond;
  auto message = socket.receive();
  while (!message && clock.now() < deadline) {
    pollfd fd{socket.fd(), POLLIN, 0};
    ::poll(&fd, 1, 20);
    message = socket.receive();
  }
  return message;
}

void make_round_trip(const std::string& bind) {
  auto server = ServerSocket::bind(bind);
  ASSERT_TRUE(server) << server.error().what;
  auto client = ClientSocket::connect((*server)->endpoint());
  ASSERT_TRUE(client);
  ASSERT_TRUE((*client)->send("question"));
  const auto question = wait_for(**server);
  ASSERT_TRUE(question);
  EXPECT_EQ(question->bytes, "question");
  ASSERT_TRUE((*server)->send(question->sender, "answer"));
  EXPECT_EQ(wait_for(**client), "answer");
}

TEST(ZmqLink, CarriesBytesThereAndBack) { make_round_trip("tcp://127.0.0.1:*"); }

TEST(ZmqLink, CarriesBytesThereAndBackOverIpv6) {
  SKIP_WITHOUT_IPV6();
  make_round_trip("tcp://[::1]:*");
}

TEST(ZmqLink, APortInUseIsOneSentence) {
  auto first = ServerSocket::bind("tcp://127.0.0.1:*");
  ASSERT_TRUE(first);
  auto second = ServerSocket::bind((*first)->endpoint());
  ASSERT_FALSE(second);
  EXPECT_EQ(second.error().code, ErrorCode::kUnavailable);
  EXPECT_NE(second.error().what.find("Address already in use"), std::string::npos) << second.error().what;
}

TEST(ZmqLink, SendingToAnUnknownPeerFailsInsteadOfThrowing) {
  auto server = ServerSocket::bind("tcp://127.0.0.1:*");
  ASSERT_TRUE(server);
  EXPECT_FALSE((*server)->send("nobody", "hello"));
}

TEST(ZmqLink, WhatComesWhileAnAnswerIsSentIsNotLost) {
  const net::KeyFile file(::testing::TempDir(), {net::kOldKey});
  const auto context =
      std::make_shared<net::ZmqContext>(net::ZmqContext::kSocketsMaxDefault, file.read(), net::Servers::kNodes);
  auto server = ServerSocket::bind("tcp://127.0.0.1:*", context).value();
  auto client = ClientSocket::connect(server->endpoint(), context).value();
  for (int round = 0; round < 20; ++round) {
    ASSERT_TRUE(client->send("first"));
    const auto first = wait_for(*server);
    ASSERT_TRUE(first);
    ASSERT_FALSE(server->receive());
    ASSERT_TRUE(client->send("second"));
    pollfd fd{server->fd(), POLLIN, 0};
    ASSERT_EQ(::poll(&fd, 1, 10'000), 1);
    ASSERT_TRUE(server->send(first->sender, "answer"));  // fetches the second message ahead
    const auto second = wait_for(*server);
    ASSERT_TRUE(second);
    EXPECT_EQ(second->bytes, "second");
    EXPECT_EQ(wait_for(*client), "answer");
  }
}

TEST(ZmqLink, WhoSendsMoreThanAnyNodeDoesIsDisconnected) {
  auto server = ServerSocket::bind("tcp://127.0.0.1:*").value();
  auto liar = ClientSocket::connect(server->endpoint()).value();
  ASSERT_TRUE(liar->send(std::string((8 << 20) + 1, 'x')));
  auto client = ClientSocket::connect(server->endpoint()).value();
  ASSERT_TRUE(client->send(std::string(8 << 20, 'x')));
  const auto message = wait_for(*server);
  ASSERT_TRUE(message);
  EXPECT_EQ(message->bytes.size(), std::size_t{8} << 20);
  // Longer messages are accepted from the node's own scheduler and workers.
  auto local = ServerSocket::bind("ipc://@kvferry-test-long-" + std::to_string(::getpid())).value();
  auto scheduler = ClientSocket::connect(local->endpoint()).value();
  ASSERT_TRUE(scheduler->send(std::string((8 << 20) + 1, 'x')));
  EXPECT_TRUE(wait_for(*local));
}

TEST(ZmqLink, NoMessageBetweenASchedulerAndItsWorkerIsDroppedHoweverManyWait) {
  constexpr int kMany = 20'000;
  auto worker = ServerSocket::bind("ipc://@kvferry-test-many-" + std::to_string(::getpid())).value();
  auto scheduler = ClientSocket::connect(worker->endpoint(), {}, /*is_own=*/true).value();
  for (int i = 0; i < kMany; ++i) ASSERT_TRUE(scheduler->send(std::to_string(i)));
  std::string sender;
  for (int i = 0; i < kMany; ++i) {
    const auto order = wait_for(*worker);
    ASSERT_TRUE(order);
    ASSERT_EQ(order->bytes, std::to_string(i));
    sender = order->sender;
  }
  for (int i = 0; i < kMany; ++i) ASSERT_TRUE(worker->send(sender, std::to_string(i)));
  for (int i = 0; i < kMany; ++i) ASSERT_EQ(wait_for(*scheduler), std::to_string(i));
}

TEST(ZmqLink, AnAddressThatIsNoneIsRefused) { EXPECT_FALSE(ClientSocket::connect("not an address")); }

TEST(ZmqLink, TellTheKeyOfTheSenderIfThereIsAListOfMembers) {
  net::MembersFolder folder;
  (void)folder.add("server", net::Role::kWorker);
  const net::ClusterKey member = folder.add("m", net::Role::kWorker), whole(std::string(64, 'c'));
  const auto context = [](const net::ClusterKey& key) {
    return std::make_shared<net::ZmqContext>(net::ZmqContext::kSocketsMaxDefault, key, net::Servers::kNodes);
  };
  const auto asks = [&](const net::ClusterKey& server_key, const net::ClusterKey& client_key) {
    const auto server = ServerSocket::bind("tcp://127.0.0.1:*", context(server_key)).value();
    const auto client = ClientSocket::connect(server->endpoint(), context(client_key)).value();
    EXPECT_TRUE(client->send("question"));
    return wait_for(*server).value_or(ServerSocket::Message{});
  };
  const ServerSocket::Message of_member = asks(folder.read("server"), member);
  EXPECT_EQ(of_member.member, "m");
  EXPECT_EQ(of_member.curve_key, hex_of(net::text_of(net::public_of(*member.content()->own).curve)));
  EXPECT_EQ(asks(folder.read("server"), folder.read("cluster")).curve_key,
            hex_of(net::text_of(net::curve_public(net::curve_secret(std::string(64, 'c'))))));
  const ServerSocket::Message without_list = asks(whole, whole);
  EXPECT_EQ(without_list.bytes, "question");
  EXPECT_EQ(without_list.curve_key, "");
}

}  // namespace
}  // namespace kvferry
