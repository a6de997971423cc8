// Tests the links to other nodes: they are made when they are needed, and dropped when they are no longer needed.
#include "connector/runtime/links/peer_links.h"

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <map>
#include <thread>

#include "tests/manual_clock.h"

namespace kvferry {
namespace {

using namespace std::chrono_literals;

std::unique_ptr<ServerSocket> server() {
  auto made = ServerSocket::bind("tcp://127.0.0.1:*");
  EXPECT_TRUE(made) << made.error().what;
  return std::move(*made);
}

template <class Value>
Value eventually(const std::function<std::optional<Value>()>& get) {
  for (int i = 0; i < 3000; ++i) {
    if (auto value = get()) return *value;
    std::this_thread::sleep_for(10ms);
  }
  ADD_FAILURE() << "nothing came";
  return {};
}

/// Sends one message to the peer and one back.
void talk(PeerLinks& links, ServerSocket& peer) {
  ASSERT_TRUE(links.send(peer.endpoint(), "ask"));
  const auto asked = eventually<ServerSocket::Message>([&] { return peer.receive(); });
  EXPECT_EQ(asked.bytes, "ask");
  ASSERT_TRUE(peer.send(asked.sender, "answer"));
  const auto answer = eventually<PeerLinks::Received>([&] { return links.receive(); });
  EXPECT_EQ(answer.endpoint, peer.endpoint());
  EXPECT_EQ(answer.bytes, "answer");
}

TEST(PeerLinks, WhatIsNoAddressIsRefusedAndNotKept) {
  const ManualClock clock;
  PeerLinks links(clock);
  EXPECT_FALSE(links.send("no address", "ask"));
  EXPECT_EQ(links.size(), 0U);
}

TEST(PeerLinks, AnIdleNodeIsDroppedWithAllThatItTold) {
  ManualClock clock;
  PeerLinks links(clock);
  const auto peer = server();
  talk(links, *peer);
  ASSERT_TRUE(links.versions().learn(
      peer->endpoint(), Envelope{kNodeWire.newest, 1, 7, "", kNodeWire.oldest, kNodeWire.newest, "7.7.7"}));
  links.set_ranks(peer->endpoint(), {{RankEndpoint{}}, {}});
  EXPECT_EQ(links.version_with(peer->endpoint()), kNodeWire.newest);
  EXPECT_EQ(links.ranks_of(peer->endpoint()).all.size(), 1U);

  clock.advance(kIdlePeer);
  links.drop_idle();
  EXPECT_EQ(links.size(), 1U);
  clock.advance(1);
  links.drop_idle();
  EXPECT_EQ(links.size(), 0U);
  EXPECT_EQ(links.version_with(peer->endpoint()), kNodeWire.oldest);
  EXPECT_TRUE(links.ranks_of(peer->endpoint()).all.empty());
  talk(links, *peer);
}

TEST(PeerLinks, WhoIsSpokenToOrHeardIsNotIdle) {
  ManualClock clock;
  PeerLinks links(clock);
  const auto peer = server();
  ASSERT_TRUE(links.send(peer->endpoint(), "ask"));
  const auto asked = eventually<ServerSocket::Message>([&] { return peer->receive(); });
  clock.advance(kIdlePeer);
  ASSERT_TRUE(peer->send(asked.sender, "late"));
  eventually<PeerLinks::Received>([&] { return links.receive(); });
  clock.advance(kIdlePeer);
  links.drop_idle();
  EXPECT_EQ(links.size(), 1U);
}

TEST(PeerLinks, APeerThatSendsWithoutABreakDoesNotSilenceTheOthers) {
  ManualClock clock;
  PeerLinks links(clock);
  const std::unique_ptr<ServerSocket> peers[] = {server(), server(), server()};
  for (const auto& peer : peers) {
    ASSERT_TRUE(links.send(peer->endpoint(), "ask"));
    const auto asked = eventually<ServerSocket::Message>([&] { return peer->receive(); });
    for (int i = 0; i < 100; ++i) ASSERT_TRUE(peer->send(asked.sender, "answer"));
  }
  std::this_thread::sleep_for(200ms);  // until all messages have arrived
  std::map<std::string, int> heard;
  for (int i = 0; i < 30; ++i) heard[eventually<PeerLinks::Received>([&] { return links.receive(); }).endpoint] += 1;
  for (const auto& peer : peers) EXPECT_EQ(heard[peer->endpoint()], 10);
}

TEST(PeerLinks, AddressesThatNobodyAnswersAtPushOutTheLongestIdle) {
  ManualClock clock;
  constexpr std::size_t kMax = 8;
  PeerLinks links(clock, kMax);
  const auto peer = server();
  ASSERT_TRUE(links.send(peer->endpoint(), "ask"));
  links.set_ranks(peer->endpoint(), {{RankEndpoint{}}, {}});
  for (std::size_t i = 0; i < 4 * kMax; ++i) {
    clock.advance(1);
    ASSERT_TRUE(links.send("tcp://127.0.0.1:" + std::to_string(20'000 + i), "ask"));
    if (i % 4 == 0) {
      ASSERT_TRUE(links.send(peer->endpoint(), "ask"));
    }
  }
  EXPECT_EQ(links.size(), kMax);
  EXPECT_EQ(links.ranks_of(peer->endpoint()).all.size(), 1U) << "it was in use all the time";
  eventually<ServerSocket::Message>([&] { return peer->receive(); });
}

}  // namespace
}  // namespace kvferry
