// Tests nodes of two releases: which version they use with each other, and the exact messages of older releases.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "connector/runtime/links/peer_links.h"

namespace kvferry {
namespace {

using ::testing::HasSubstr;
using namespace std::string_literals;

constexpr const char* kPeer = "tcp://peer:1";

Envelope from(VersionRange speaks, std::uint32_t version) {
  return {version, 1, 7, "", speaks.oldest, speaks.newest, "7.7.7"};
}

TEST(PeerVersions, ANodeIsSpokenToInTheOldestUntilItTellsWhatItSpeaks) {
  PeerVersions versions({2, 4});
  EXPECT_EQ(versions.spoken_with(kPeer), 2u);
  EXPECT_TRUE(versions.learn(kPeer, from({1, 3}, 2)));
  EXPECT_EQ(versions.spoken_with(kPeer), 3u);
  EXPECT_EQ(versions.spoken_with("tcp://other:1"), 2u);
  EXPECT_TRUE(versions.learn(kPeer, from({2, 2}, 2))) << "it was replaced by an older release";
  EXPECT_EQ(versions.spoken_with(kPeer), 2u);
}

TEST(PeerVersions, AnAnswerInAStrangeVersionIsNotReadButTeaches) {
  PeerVersions versions({2, 4});
  const Result<void> learnt = versions.learn(kPeer, from({3, 6}, 6));
  ASSERT_FALSE(learnt);
  EXPECT_EQ(versions.spoken_with(kPeer), 4u);
}

TEST(PeerVersions, NothingInCommonIsToldWithBothSidesVersions) {
  PeerVersions versions({2, 4});
  for (const Result<void>& refused : {versions.learn(kPeer, from({5, 6}, 5)), versions.check(kPeer, from({5, 6}, 5))}) {
    ASSERT_FALSE(refused);
    EXPECT_THAT(refused.error().what, HasSubstr("speaks versions 2 to 4"));
    EXPECT_THAT(refused.error().what, HasSubstr("(kvferry 7.7.7) speaks versions 5 to 6"));
  }
  EXPECT_EQ(versions.spoken_with(kPeer), 2u);
}

TEST(PeerVersions, ARequestInAVersionThatIsNotSpokenIsToldWhichIs) {
  const PeerVersions versions({2, 4});
  EXPECT_TRUE(versions.check(kPeer, from({1, 3}, 3)));
  const Result<void> checked = versions.check(kPeer, from({1, 3}, 1));
  ASSERT_FALSE(checked);
  EXPECT_THAT(checked.error().what, HasSubstr("use version 3"));
}

// [version 2, lease request, id 7, body], as the last release without version negotiation sent it, and its answer.
const std::string kOldRequest = "\x94\x02\x01\x07\xa1x"s;

struct OldEnvelope {
  std::uint32_t version = 2, type = 0;
  std::uint64_t id = 0;
  std::string body;
  KVFERRY_FIELDS(version, type, id, body);
};

TEST(PeerVersions, MessagesKeepTheirNumbersOnTheWire) {
  EXPECT_EQ(kMessageType<LeaseRequest>, 1u);
  EXPECT_EQ(kMessageType<PullOrder>, 4u);
  EXPECT_EQ(kMessageType<PushOffer>, 6u);
  EXPECT_EQ(kMessageType<GrantOrder>, 9u);
  EXPECT_EQ(kMessageType<Revoked>, 12u);
  EXPECT_EQ(kMessageType<PushOutcome>, 16u);
  EXPECT_EQ(kMessageType<ChecksumOutcome>, 18u);
  EXPECT_EQ(kMessageType<SlotsWritten>, 24u);
  EXPECT_EQ(kMessageType<PushProgress>, 25u);
  EXPECT_EQ(encode(LeaseRelease{{5}}), encode(std::uint64_t{5}));
  EXPECT_EQ(encode(Revoked{Revocation{3, 1, {}}}), encode(Revocation{3, 1, {}}));
  EXPECT_EQ(unseal<PeerRequest>(Envelope{2, 99, 7, ""}).error().code, ErrorCode::kNotFound);
}

TEST(PeerVersions, AnOldNodesMessageIsReadAndOursCanBeReadByIt) {
  const Result<Envelope> envelope = decode<Envelope>(kOldRequest, "peer message");
  ASSERT_TRUE(envelope) << envelope.error().what;
  EXPECT_EQ(envelope->type, kMessageType<LeaseRequest>);
  PeerVersions versions;
  EXPECT_TRUE(versions.check(kPeer, *envelope));
  EXPECT_TRUE(versions.learn(kPeer, *envelope));
  EXPECT_EQ(versions.spoken_with(kPeer), 2u);
  const auto read = decode<OldEnvelope>(seal(9, LeaseRequest{}, 2), "peer message");
  ASSERT_TRUE(read);
  EXPECT_EQ(read->version, 2u);
  EXPECT_EQ(read->id, 9u);
  EXPECT_TRUE(decode<LeaseRequest>(read->body, "lease request"));
}

/// PushReply as the releases before announcements of layers send it.
struct OldPushReply {
  std::uint64_t reservation = 0;
  std::string refused;
  std::vector<std::uint8_t> verdicts;
  KVFERRY_FIELDS(reservation, refused, verdicts);
};

TEST(PeerVersions, AnOldDecodeNodeGetsNoAnnouncementsOfLayers) {
  const auto reply = decode<PushReply>(encode(OldPushReply{5, "", {3}}), "push reply");
  ASSERT_TRUE(reply);
  EXPECT_FALSE(reply->takes_layers);
  PushReply ours{5, "", {3}};
  ours.takes_layers = true;
  EXPECT_TRUE(decode<OldPushReply>(encode(ours), "push reply")) << "it ignores what it does not know";
}

TEST(PeerVersions, AnOldNodeIsRefusedByASuccessorThatDroppedItsVersion) {
  const PeerVersions versions({3, 4});
  const Result<void> checked = versions.check("the node that asks", *decode<Envelope>(kOldRequest, "peer message"));
  ASSERT_FALSE(checked);
  EXPECT_THAT(checked.error().what, HasSubstr("the node that asks (of an older kvferry) speaks version 2"));
}

}  // namespace
}  // namespace kvferry
