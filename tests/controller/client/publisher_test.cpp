#include "controller/client/publisher.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/controller/fixtures.h"

namespace kvferry::controller {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using Answer = Publisher::Answer;

class PublisherTest : public ::testing::Test {
 protected:
  /// Returns the sequence numbers of the messages since the last call, with marks for snapshots.
  std::vector<std::string> sent() {
    std::vector<std::string> sent;
    for (const std::string& bytes : std::exchange(sent_, {})) {
      const wire::FromNode message = wire::parse<wire::FromNode>(bytes).value();
      if (const auto* evict = std::get_if<wire::Evict>(&message)) {
        sent.push_back(fmt::format("-{}", evict->sequence));
        continue;
      }
      const auto& publish = std::get<wire::Publish>(message);
      EXPECT_EQ(publish.begins_snapshot, publish.has_end);
      sent.push_back(fmt::format("{}{}",
                                 publish.begins_snapshot ? "("
                                 : publish.ends_snapshot ? ")"
                                                         : "+",
                                 publish.sequence));
    }
    return sent;
  }
  std::uint64_t num_keys(Tier tier) const { return publisher_.digests()[static_cast<std::size_t>(tier)].num_keys; }

  std::vector<std::string> sent_;
  Publisher publisher_{Incarnation{7}, 1000, [this](std::string_view bytes) { sent_.emplace_back(bytes); }};
};

TEST_F(PublisherTest, NumbersEachMessageAndCutsLongLists) {
  publisher_.publish(full_chunks(0, wire::kChunksPerPublishMax + 1));
  publisher_.evict(keys_of(0, wire::kChunksPerPublishMax + 1));
  publisher_.publish({});  // no chunks, so no message is sent
  EXPECT_THAT(sent(), ElementsAre("+0", "+1", "-2", "-3"));
  EXPECT_EQ(publisher_.next_sequence(), 4U);
}

TEST_F(PublisherTest, KnowsTheDigestOfWhatItPublished) {
  publisher_.publish(full_chunks(0, 3), Tier::kHost);
  publisher_.publish(full_chunks(0, 3), Tier::kHost);  // these chunks are already published
  publisher_.publish(full_chunks(2, 4), Tier::kDisk);
  EXPECT_EQ(num_keys(Tier::kHost), 3U);
  EXPECT_EQ(num_keys(Tier::kDisk), 2U);
  publisher_.evict(keys_of(2, 9));  // evicts from both tiers; most of these keys were never there
  EXPECT_EQ(num_keys(Tier::kHost), 2U);
  EXPECT_EQ(num_keys(Tier::kDisk), 0U);
  TierDigests expected;
  expected[static_cast<std::size_t>(Tier::kHost)].add(key_of(1));
  expected[static_cast<std::size_t>(Tier::kHost)].add(key_of(0));
  EXPECT_EQ(publisher_.digests(), expected);
  publisher_.begin_snapshot();
  EXPECT_EQ(publisher_.digests(), TierDigests{});
}

TEST_F(PublisherTest, SendsAgainWhatIsMissing) {
  for (std::uint32_t i = 0; i < 5; ++i) publisher_.publish(full_chunks(i, i + 1));
  sent();
  const wire::SnapshotWanted wanted{.next_sequence = 5, .resend_will_do = true, .resend_from = 3};
  EXPECT_EQ(publisher_.answer(wanted), Answer::kSentAgain);
  EXPECT_THAT(sent(), ElementsAre("+3", "+4"));
}

TEST_F(PublisherTest, BeginsASnapshotWhereTheMissingIsTooOld) {
  for (std::uint32_t i = 0; i < 100; ++i) publisher_.publish(full_chunks(i, i + 1));
  EXPECT_LT(publisher_.num_kept(), 50U);
  sent();
  EXPECT_EQ(publisher_.answer({.next_sequence = 100, .resend_will_do = true, .resend_from = 3}),
            Answer::kSnapshotBegun);
  EXPECT_THAT(sent(), ElementsAre("(100"));
  EXPECT_EQ(publisher_.answer({.next_sequence = 100, .resend_will_do = true, .resend_from = 3}), Answer::kOnItsWay);
  publisher_.publish(full_chunks(0, 1));
  publisher_.end_snapshot();
  EXPECT_THAT(sent(), ElementsAre("+101", ")102"));
  // Now the beginning of the snapshot was lost too. To send it again replaces all messages before it.
  EXPECT_EQ(publisher_.answer({.next_sequence = 103, .resend_will_do = true, .resend_from = 3}), Answer::kSentAgain);
  EXPECT_THAT(sent(), ElementsAre("(100", "+101", ")102"));
  EXPECT_EQ(publisher_.answer({.next_sequence = 103, .resend_will_do = false, .resend_from = 100}), Answer::kSentAgain);
  EXPECT_THAT(sent(), ElementsAre("(100", "+101", ")102"));
  // The snapshot arrived, but did not repair the difference, so another snapshot is needed.
  EXPECT_EQ(publisher_.answer({.next_sequence = 103, .resend_will_do = false, .resend_from = 103}),
            Answer::kSnapshotBegun);
  EXPECT_THAT(sent(), ElementsAre("(103"));
}

TEST_F(PublisherTest, AnOlderControllerGetsASnapshot) {
  publisher_.begin_snapshot();
  publisher_.publish(full_chunks(0, 1));
  publisher_.end_snapshot();
  sent();
  EXPECT_EQ(publisher_.answer({.next_sequence = 3}), Answer::kSnapshotBegun);
  EXPECT_THAT(sent(), ElementsAre("(3"));
}

TEST_F(PublisherTest, NonsenseFromAControllerDoesNoHarm) {
  publisher_.publish(full_chunks(0, 1));
  sent();
  constexpr std::uint64_t kHuge = ~std::uint64_t{0};
  EXPECT_EQ(publisher_.answer({.next_sequence = kHuge, .resend_will_do = true, .resend_from = kHuge}),
            Answer::kSnapshotBegun);
  EXPECT_EQ(publisher_.answer({.next_sequence = kHuge, .resend_will_do = true, .resend_from = 0}), Answer::kSentAgain);
  EXPECT_THAT(sent(), ElementsAre("(1", "(1"));
  EXPECT_EQ(publisher_.answer({}), Answer::kOnItsWay);
  EXPECT_THAT(sent(), IsEmpty());
}

}  // namespace
}  // namespace kvferry::controller
