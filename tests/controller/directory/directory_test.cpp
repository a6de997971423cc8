#include "controller/directory/directory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/controller/fixtures.h"

namespace kvferry::controller {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr TimeNs kStart = kSecond;

class DirectoryTest : public ::testing::Test {
 protected:
  /// Adds a node that has begun its snapshot, so the node's next message has sequence number 1.
  NodeId joined(const NodeInfo& info) {
    const Joined node = directory_.join(info, 0, now_).value();
    EXPECT_TRUE(node.snapshot_wanted);
    EXPECT_EQ(directory_.publish(node.id, 0, SnapshotMark::kReplaces, {}, now_), Update::kApplied);
    return node.id;
  }
  void publish(NodeId node, const std::vector<ChunkEntry>& chunks) {
    ASSERT_EQ(directory_.publish(node, directory_.repair(node).resend_from, SnapshotMark::kNone, chunks, now_),
              Update::kApplied);
  }
  void evict(NodeId node, const std::vector<ChunkKey>& keys) {
    ASSERT_EQ(directory_.evict(node, directory_.repair(node).resend_from, keys, now_), Update::kApplied);
  }
  std::vector<Holder> lookup(NodeId asker, const LookupQuery& query) {
    return directory_.lookup(asker, query, now_).value();
  }
  /// Returns "engine:full chunks" of each holder, in order.
  std::vector<std::string> who_has(NodeId asker, const LookupQuery& query) {
    std::vector<std::string> names;
    for (const Holder& holder : lookup(asker, query))
      names.push_back(fmt::format("{}:{}", holder.engine_id, holder.num_full_chunks));
    return names;
  }
  std::vector<ChunkKey> tails_of_first_holder(NodeId asker, const LookupQuery& query) {
    std::vector<ChunkKey> keys;
    const std::vector<Holder> holders = lookup(asker, query);
    if (holders.empty()) return keys;
    for (const ChunkEntry& tail : holders[0].tails) keys.push_back(tail.key);
    return keys;
  }

  Directory directory_{{.nodes_max = 8, .chunks_per_node_max = 100, .chunks_max = 150, .tails_per_group_max = 20}};
  TimeNs now_ = kStart;
};

TEST_F(DirectoryTest, LookupOrdersHoldersByPrefixThenByLastWord) {
  const NodeId asker = joined(node_info("asker"));
  const NodeId a = joined(node_info("a"));
  const NodeId b = joined(node_info("b"));
  const NodeId c = joined(node_info("c"));
  publish(a, full_chunks(0, 3));
  publish(b, full_chunks(0, 5));
  publish(c, full_chunks(0, 3));
  publish(asker, full_chunks(0, 9));  // a node is never told of its own chunks
  now_ += kMillisecond;
  directory_.heartbeat(c, directory_.repair(c).resend_from, now_);
  EXPECT_THAT(who_has(asker, {.keys = keys_of(0, 9), .tail_groups = {}, .exact_tails = {}}),
              ElementsAre("b:5", "c:3", "a:3"));
}

TEST_F(DirectoryTest, APrefixEndsAtTheFirstGap) {
  const NodeId asker = joined(node_info("asker"));
  const NodeId a = joined(node_info("a"));
  publish(a, full_chunks(0, 6));
  evict(a, {key_of(2)});
  EXPECT_THAT(who_has(asker, {.keys = keys_of(0, 6), .tail_groups = {}, .exact_tails = {}}), ElementsAre("a:2"));
  EXPECT_THAT(who_has(asker, {.keys = keys_of(3, 6), .tail_groups = {}, .exact_tails = {}}), ElementsAre("a:3"));
  evict(a, {key_of(0)});
  EXPECT_THAT(who_has(asker, {.keys = keys_of(0, 6), .tail_groups = {}, .exact_tails = {}}), IsEmpty());
}

TEST_F(DirectoryTest, AHolderNamesItsSlowestTierAndWhetherItsWordIsWhole) {
  const NodeId asker = joined(node_info("asker"));
  const NodeId a = joined(node_info("a"));
  const LookupQuery query{.keys = keys_of(0, 4), .tail_groups = {}, .exact_tails = {}};
  directory_.publish(a, 1, SnapshotMark::kNone, full_chunks(0, 3), now_, Tier::kGpu);
  EXPECT_EQ(lookup(asker, query)[0].tier, Tier::kGpu);
  // chunks 1 and 2 are in both tiers
  directory_.publish(a, 2, SnapshotMark::kNone, full_chunks(1, 4), now_, Tier::kDisk);
  EXPECT_EQ(lookup(asker, query)[0].num_full_chunks, 4U);
  EXPECT_EQ(lookup(asker, query)[0].tier, Tier::kDisk);
  EXPECT_TRUE(lookup(asker, query)[0].confirmed);
  evict(a, keys_of(1, 4));  // evicts from both tiers
  EXPECT_EQ(lookup(asker, query)[0].num_full_chunks, 1U);
  EXPECT_EQ(lookup(asker, query)[0].tier, Tier::kGpu);
  EXPECT_EQ(directory_.num_chunks(), 1U);
  EXPECT_EQ(directory_.publish(a, 5, SnapshotMark::kNone, {}, now_), Update::kRepairWanted);  // message 4 is lost
  EXPECT_FALSE(lookup(asker, query)[0].confirmed);
  directory_.publish(a, 6, SnapshotMark::kReplaces, full_chunks(0, 1), now_);
  EXPECT_TRUE(lookup(asker, query)[0].confirmed);
}

TEST_F(DirectoryTest, TheIndexVersionGrowsWithEachChange) {
  const NodeId a = joined(node_info("a"));
  const NodeId b = joined(node_info("b"));
  std::uint64_t last = directory_.index_version();
  const auto has_grown = [&] { return directory_.index_version() > std::exchange(last, directory_.index_version()); };
  publish(a, full_chunks(0, 2));
  EXPECT_TRUE(has_grown());
  evict(a, keys_of(0, 1));
  EXPECT_TRUE(has_grown());
  lookup(b, {.keys = keys_of(0, 2), .tail_groups = {}, .exact_tails = {}});
  EXPECT_FALSE(has_grown());
  directory_.leave(a);
  EXPECT_TRUE(has_grown());
}

TEST_F(DirectoryTest, WhatTheDeadLeftBehindIsNeverSeenAndGoesBitByBit) {
  Directory directory({.tails_per_group_max = 20});
  const auto join = [&](const std::string& name, std::uint64_t incarnation) {
    const NodeId node = directory.join(node_info(name, incarnation), 0, now_)->id;
    directory.publish(node, 0, SnapshotMark::kReplaces, {}, now_);
    return node;
  };
  const NodeId asker = join("asker", 1);
  std::vector<ChunkEntry> tails;
  for (std::uint32_t i = 0; i < 10'000; ++i) tails.push_back(tail_chunk(20'000 + i, 50 + i % 1000));
  const LookupQuery query{.keys = keys_of(0, 100), .tail_groups = {key_of(50)}, .exact_tails = {key_of(20'000)}};
  for (std::uint64_t incarnation = 1; incarnation <= 20; ++incarnation) {
    const NodeId a = join("a", incarnation);
    EXPECT_THAT(directory.lookup(asker, query, now_).value(), IsEmpty());
    directory.publish(a, 1, SnapshotMark::kNone, full_chunks(0, 10'000), now_);
    directory.publish(a, 2, SnapshotMark::kNone, tails, now_);
    const std::vector<Holder> holders = directory.lookup(asker, query, now_).value();
    ASSERT_EQ(holders.size(), 1U);
    EXPECT_EQ(holders[0].num_full_chunks, 100U);
    EXPECT_EQ(holders[0].tails.size(), 1U) << "the group's tails lie within its full chunks";
    EXPECT_EQ(directory.num_chunks(), 20'000U);
    for (std::uint64_t turn = 0; turn < incarnation % 4 * 3; ++turn) directory.expire(now_);
  }
}

TEST_F(DirectoryTest, TellsAtMostTheBestHolders) {
  Directory directory({.holders_per_reply_max = 2});
  const NodeId asker = directory.join(node_info("asker"), 0, now_)->id;
  for (std::uint32_t i = 1; i <= 4; ++i) {
    const NodeId node = directory.join(node_info(std::to_string(i)), 0, now_)->id;
    directory.publish(node, 0, SnapshotMark::kReplaces, full_chunks(0, i), now_);
  }
  const auto holders = directory.lookup(asker, {.keys = keys_of(0, 4), .tail_groups = {}, .exact_tails = {}}, now_);
  ASSERT_EQ(holders->size(), 2U);
  EXPECT_EQ((*holders)[0].engine_id.value, "4");
  EXPECT_EQ((*holders)[1].engine_id.value, "3");
}

TEST_F(DirectoryTest, TailsAreFoundByGroupNewestFirstAndByName) {
  const NodeId asker = joined(node_info("asker"));
  const NodeId a = joined(node_info("a"));
  publish(a, {tail_chunk(10, 50), tail_chunk(11, 50), tail_chunk(12, 51), tail_chunk(13, 52, 7)});
  // Groups 49, 50 and 51 belong to tails after 0, 1 and 2 full chunks.
  LookupQuery query{.keys = {}, .tail_groups = keys_of(49, 52), .exact_tails = {key_of(13), key_of(99)}};
  EXPECT_THAT(tails_of_first_holder(asker, query), ElementsAre(key_of(13), key_of(12), key_of(11), key_of(10)));
  publish(a, {tail_chunk(10, 50)});  // published again, so this tail is the newest now
  query.exact_tails.clear();
  EXPECT_THAT(tails_of_first_holder(asker, query), ElementsAre(key_of(12), key_of(10), key_of(11)));
  EXPECT_EQ(lookup(asker, query)[0].tails[0].num_tokens, 100U);
  EXPECT_EQ(lookup(asker, query)[0].tails[0].tail_group, key_of(51));
}

TEST_F(DirectoryTest, ATailTooShortForAGroupIsFoundByNameAlone) {
  const NodeId asker = joined(node_info("asker"));
  const NodeId a = joined(node_info("a"));
  publish(a, {tail_chunk(10, 50, kTailGroupTokens - 1), tail_chunk(11, 50, kTailGroupTokens)});
  EXPECT_THAT(tails_of_first_holder(asker, {.keys = {}, .tail_groups = {key_of(50)}, .exact_tails = {}}),
              ElementsAre(key_of(11)));
  EXPECT_THAT(tails_of_first_holder(asker, {.keys = {}, .tail_groups = {}, .exact_tails = {key_of(10)}}),
              ElementsAre(key_of(10)));
}

TEST_F(DirectoryTest, TailsWithinAHoldersOwnFullChunksAreLeftOut) {
  const NodeId asker = joined(node_info("asker"));
  const NodeId a = joined(node_info("a"));
  publish(a, full_chunks(0, 2));
  publish(a, {tail_chunk(10, 50), tail_chunk(11, 51), tail_chunk(12, 52), tail_chunk(13, 53)});
  EXPECT_THAT(tails_of_first_holder(asker, {.keys = keys_of(0, 3), .tail_groups = keys_of(50, 54), .exact_tails = {}}),
              ElementsAre(key_of(13), key_of(12)));
}

TEST_F(DirectoryTest, AGroupKeepsSixteenTailsANodeAndABoundOverAll) {
  const NodeId asker = joined(node_info("asker"));
  const NodeId a = joined(node_info("a"));
  const NodeId b = joined(node_info("b"));
  for (std::uint32_t i = 0; i < 18; ++i) publish(a, {tail_chunk(100 + i, 50)});
  const LookupQuery query{.keys = {}, .tail_groups = {key_of(50)}, .exact_tails = {}};
  std::vector<ChunkKey> tails = tails_of_first_holder(asker, query);
  ASSERT_EQ(tails.size(), kTailsPerHolderMax);
  EXPECT_EQ(tails.front(), key_of(117));
  EXPECT_EQ(tails.back(), key_of(102));
  // the group's limit is 20, so the six oldest tails of `a` are removed
  for (std::uint32_t i = 0; i < 10; ++i) publish(b, {tail_chunk(200 + i, 50)});
  std::size_t num_tails = 0;
  for (const Holder& holder : lookup(asker, query)) num_tails += holder.tails.size();
  EXPECT_EQ(num_tails, 20U);
  EXPECT_THAT(tails_of_first_holder(asker, {.keys = {}, .tail_groups = {}, .exact_tails = {key_of(100)}}),
              ElementsAre(key_of(100)));  // this tail was removed from its group, but can still be found by its key
}

TEST_F(DirectoryTest, RefusesAnotherFingerprintWhileTheNamespaceLives) {
  const NodeId a = joined(node_info("a", 1, "prod", "model=a"));
  const Result<Joined> refused = directory_.join(node_info("b", 1, "prod", "model=b"), 0, now_);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kRefused);
  EXPECT_THAT(refused.error().what, HasSubstr("'prod'"));
  EXPECT_THAT(refused.error().what, HasSubstr("model is 'a' here"));
  EXPECT_THAT(refused.error().what, HasSubstr("and 'b' there"));
  // another namespace may have another fingerprint
  EXPECT_TRUE(directory_.join(node_info("b", 1, "test", "model=b"), 0, now_));
  // the same node may not change its fingerprint either
  EXPECT_FALSE(directory_.join(node_info("a", 1, "prod", "model=b"), 0, now_));
  directory_.leave(a);
  // the namespace's last node has left, so another fingerprint is allowed
  EXPECT_TRUE(directory_.join(node_info("b", 1, "prod", "model=b"), 0, now_));
}

TEST_F(DirectoryTest, ALoneNodeMayComeBackWithAnotherFingerprint) {
  const NodeId old = joined(node_info("a", 1, "", "model=a"));
  const Result<Joined> fresh = directory_.join(node_info("a", 2, "", "model=b"), 0, now_);
  ASSERT_TRUE(fresh) << fresh.error().what;
  EXPECT_EQ(fresh->fenced, old);
}

TEST_F(DirectoryTest, NamespacesDoNotSeeEachOther) {
  const NodeId a = joined(node_info("a", 1, "one"));
  const NodeId b = joined(node_info("b", 1, "two"));
  const NodeId twin = joined(node_info("a", 7, "two"));  // a node in another namespace with the same engine id
  publish(a, full_chunks(0, 2));
  const LookupQuery query{.keys = keys_of(0, 2), .tail_groups = {}, .exact_tails = {}};
  EXPECT_THAT(who_has(b, query), IsEmpty());
  publish(twin, full_chunks(0, 1));
  EXPECT_THAT(who_has(b, query), ElementsAre("a:1"));
}

TEST_F(DirectoryTest, ANewerIncarnationFencesTheOlderAtOnce) {
  const NodeId asker = joined(node_info("asker"));
  const NodeId old = joined(node_info("a", 1));
  publish(old, full_chunks(0, 3));
  const Joined fresh = directory_.join(node_info("a", 2), 0, now_).value();
  EXPECT_EQ(fresh.fenced, old);
  EXPECT_TRUE(fresh.snapshot_wanted);
  const LookupQuery query{.keys = keys_of(0, 3), .tail_groups = {}, .exact_tails = {}};
  EXPECT_THAT(who_has(asker, query), IsEmpty());
  // Messages that the old incarnation still sends are refused, and it can't join again.
  EXPECT_EQ(directory_.publish(old, 2, SnapshotMark::kNone, full_chunks(0, 3), now_), Update::kUnknownNode);
  EXPECT_EQ(directory_.heartbeat(old, 2, now_), Update::kUnknownNode);
  EXPECT_FALSE(directory_.leave(old));
  EXPECT_THAT(who_has(asker, query), IsEmpty());
  const Result<Joined> late = directory_.join(node_info("a", 1), 0, now_);
  ASSERT_FALSE(late);
  EXPECT_EQ(late.error().code, ErrorCode::kRefused);
  EXPECT_EQ(directory_.num_chunks(), 0U);
}

TEST_F(DirectoryTest, TheSameIncarnationKeepsItsChunksIfNoMessageIsMissing) {
  const NodeId asker = joined(node_info("asker"));
  const NodeId a = joined(node_info("a"));
  publish(a, full_chunks(0, 2));  // this was message 1
  const Joined again = directory_.join(node_info("a"), 2, now_).value();
  EXPECT_EQ(again.id, a);
  EXPECT_FALSE(again.snapshot_wanted);
  EXPECT_THAT(who_has(asker, {.keys = keys_of(0, 2), .tail_groups = {}, .exact_tails = {}}), ElementsAre("a:2"));
  const Joined after_loss = directory_.join(node_info("a"), 5, now_).value();
  EXPECT_FALSE(after_loss.snapshot_wanted);
  EXPECT_TRUE(after_loss.resend_wanted);
  EXPECT_EQ(directory_.repair(a).resend_from, 2U);
  EXPECT_TRUE(directory_.join(node_info("a"), 1, now_)->snapshot_wanted) << "it counts anew";
}

TEST_F(DirectoryTest, WhatComesAfterALossWaitsForItToBeSentAgain) {
  const NodeId asker = joined(node_info("asker"));
  const NodeId a = joined(node_info("a"));
  const LookupQuery query{.keys = keys_of(0, 4), .tail_groups = {}, .exact_tails = {}};
  publish(a, full_chunks(0, 2));  // message 1; message 2, which publishes chunk 2, is lost
  EXPECT_EQ(directory_.evict(a, 3, {{key_of(2)}}, now_), Update::kRepairWanted);
  EXPECT_EQ(directory_.publish(a, 4, SnapshotMark::kNone, full_chunks(3, 4), now_), Update::kApplied)
      << "asked already";
  EXPECT_THAT(who_has(asker, query), ElementsAre("a:2")) << "served meanwhile";
  EXPECT_FALSE(lookup(asker, query)[0].confirmed);
  const Repair repair = directory_.repair(a);
  EXPECT_EQ(repair.resend_from, 2U);
  EXPECT_EQ(repair.heard_below, 5U);
  EXPECT_TRUE(repair.resend_will_do);
  publish(a, full_chunks(2, 3));
  EXPECT_FALSE(lookup(asker, query)[0].confirmed);
  evict(a, {key_of(2)});
  publish(a, full_chunks(3, 4));
  EXPECT_TRUE(lookup(asker, query)[0].confirmed);
  EXPECT_THAT(who_has(asker, query), ElementsAre("a:2")) << "the eviction came after what it evicts";
  EXPECT_EQ(directory_.num_chunks(), 3U);
}

TEST_F(DirectoryTest, ALossIsAskedAboutAgainButNotAtEveryMessage) {
  const NodeId a = joined(node_info("a"));
  EXPECT_EQ(directory_.heartbeat(a, 1, now_), Update::kApplied);
  EXPECT_EQ(directory_.heartbeat(a, 4, now_), Update::kRepairWanted) << "the last messages were lost";
  now_ += 199 * kMillisecond;
  EXPECT_EQ(directory_.heartbeat(a, 4, now_), Update::kApplied);
  publish(a, {});  // message 1: the missing messages have begun to arrive
  now_ += 199 * kMillisecond;
  EXPECT_EQ(directory_.heartbeat(a, 4, now_), Update::kApplied);
  now_ += kMillisecond;
  EXPECT_EQ(directory_.heartbeat(a, 4, now_), Update::kRepairWanted) << "the rest was lost again";
  EXPECT_EQ(directory_.repair(a).resend_from, 2U);
}

TEST_F(DirectoryTest, ASnapshotIsFilledInUnseenAndSwappedAtItsEnd) {
  const NodeId asker = joined(node_info("asker"));
  const NodeId a = joined(node_info("a"));
  const LookupQuery query{.keys = keys_of(0, 9), .tail_groups = {}, .exact_tails = {}};
  publish(a, full_chunks(0, 6));  // 1
  const auto tell = [&](std::uint64_t sequence, SnapshotMark mark, const std::vector<ChunkEntry>& chunks) {
    return directory_.publish(a, sequence, mark, chunks, now_);
  };
  EXPECT_EQ(tell(2, SnapshotMark::kBegins, {}), Update::kApplied);
  EXPECT_EQ(tell(3, SnapshotMark::kNone, full_chunks(0, 4)), Update::kApplied);
  EXPECT_THAT(who_has(asker, query), ElementsAre("a:6"));
  EXPECT_EQ(directory_.num_chunks(), 6U);
  EXPECT_FALSE(lookup(asker, query)[0].confirmed);
  publish(a, full_chunks(6, 7));  // new chunks while the snapshot is in progress
  evict(a, {key_of(3)});
  EXPECT_THAT(who_has(asker, query), ElementsAre("a:3"));
  publish(a, full_chunks(3, 4));
  EXPECT_THAT(who_has(asker, query), ElementsAre("a:7"));
  EXPECT_EQ(directory_.heartbeat(a, 7, now_ + kSecond), Update::kApplied) << "it is under way, so nobody asks";
  EXPECT_EQ(tell(7, SnapshotMark::kEnds, full_chunks(7, 8)), Update::kApplied);
  EXPECT_THAT(who_has(asker, query), ElementsAre("a:4")) << "4 and 5 were not told again";
  EXPECT_TRUE(lookup(asker, query)[0].confirmed);
  EXPECT_EQ(directory_.num_chunks(), 6U) << "0 to 3, 6 and 7";
  evict(a, keys_of(0, 9));
  EXPECT_EQ(directory_.num_chunks(), 0U);
}

TEST_F(DirectoryTest, TailsOfASnapshotUnderWayAreNotSeenTwice) {
  const NodeId asker = joined(node_info("asker"));
  const NodeId a = joined(node_info("a"));
  publish(a, {tail_chunk(10, 50)});
  directory_.publish(a, 2, SnapshotMark::kBegins, std::vector{tail_chunk(10, 50)}, now_);
  const LookupQuery query{.keys = {}, .tail_groups = {key_of(50)}, .exact_tails = {key_of(10)}};
  ASSERT_EQ(lookup(asker, query).size(), 1U);
  EXPECT_THAT(tails_of_first_holder(asker, query), ElementsAre(key_of(10)));
  directory_.publish(a, 3, SnapshotMark::kEnds, {}, now_);
  ASSERT_EQ(lookup(asker, query).size(), 1U);
  EXPECT_THAT(tails_of_first_holder(asker, query), ElementsAre(key_of(10)));
}

TEST_F(DirectoryTest, ASnapshotThatNeverEndsLeavesNothingBehind) {
  const NodeId asker = joined(node_info("asker"));
  NodeId a = joined(node_info("a"));
  const LookupQuery query{.keys = keys_of(0, 9), .tail_groups = {}, .exact_tails = {}};
  publish(a, full_chunks(0, 3));  // 1
  // This snapshot takes too long.
  directory_.publish(a, 2, SnapshotMark::kBegins, full_chunks(4, 9), now_);
  for (int i = 0; i <= 100; ++i) {
    EXPECT_EQ(directory_.heartbeat(a, 3, now_), Update::kApplied);
    directory_.heartbeat(asker, 1, now_);
    directory_.expire(now_);
    now_ += 100 * kMillisecond;
  }
  directory_.expire(now_);
  EXPECT_EQ(directory_.heartbeat(a, 3, now_), Update::kRepairWanted);
  EXPECT_FALSE(directory_.repair(a).resend_will_do);
  EXPECT_EQ(directory_.num_chunks(), 8U) << "what was told in it is true, so it is known";
  directory_.publish(a, 3, SnapshotMark::kEnds, {}, now_);
  EXPECT_FALSE(lookup(asker, query)[0].confirmed) << "the end of nothing";
  // Another snapshot begins.
  directory_.publish(a, 4, SnapshotMark::kBegins, full_chunks(0, 9), now_);
  directory_.publish(a, 5, SnapshotMark::kBegins, full_chunks(0, 2), now_);
  directory_.publish(a, 6, SnapshotMark::kEnds, {}, now_);
  EXPECT_THAT(who_has(asker, query), ElementsAre("a:2"));
  EXPECT_EQ(directory_.num_chunks(), 2U);
  // A new incarnation joins during a snapshot; later the node leaves during a snapshot.
  directory_.publish(a, 7, SnapshotMark::kBegins, full_chunks(0, 9), now_);
  a = directory_.join(node_info("a", 2), 0, now_)->id;
  EXPECT_THAT(who_has(asker, query), IsEmpty());
  EXPECT_EQ(directory_.num_chunks(), 0U);
  directory_.publish(a, 0, SnapshotMark::kBegins, full_chunks(0, 9), now_);
  EXPECT_THAT(who_has(asker, query), ElementsAre("a:9")) << "where nothing was known there is nothing to wait for";
  EXPECT_FALSE(lookup(asker, query)[0].confirmed);
  directory_.publish(a, 1, SnapshotMark::kBegins, full_chunks(0, 5), now_);
  directory_.leave(a);
  EXPECT_THAT(who_has(asker, query), IsEmpty());
  EXPECT_EQ(directory_.num_chunks(), 0U);
  while (directory_.expire(now_).empty() && directory_.num_nodes() > 1) now_ += kMillisecond;
}

TEST_F(DirectoryTest, ASnapshotMayBeginAfterALossAndGapsWithinAreFilled) {
  const NodeId asker = joined(node_info("asker"));
  const NodeId a = joined(node_info("a"));
  const LookupQuery query{.keys = keys_of(0, 9), .tail_groups = {}, .exact_tails = {}};
  publish(a, full_chunks(0, 6));  // message 1; message 2 is lost
  EXPECT_EQ(directory_.publish(a, 3, SnapshotMark::kBegins, {}, now_), Update::kApplied);
  EXPECT_EQ(directory_.publish(a, 5, SnapshotMark::kEnds, {}, now_), Update::kRepairWanted);  // message 4 is lost
  EXPECT_TRUE(directory_.repair(a).resend_will_do);
  EXPECT_THAT(who_has(asker, query), ElementsAre("a:6")) << "not ended before it is whole";
  publish(a, full_chunks(0, 2));
  EXPECT_EQ(directory_.publish(a, 5, SnapshotMark::kEnds, {}, now_), Update::kApplied);
  EXPECT_THAT(who_has(asker, query), ElementsAre("a:2"));
  EXPECT_TRUE(lookup(asker, query)[0].confirmed);
}

TEST_F(DirectoryTest, ADigestThatDiffersShowsWhatNobodySaw) {
  const NodeId asker = joined(node_info("asker"));
  const NodeId a = joined(node_info("a"));
  const LookupQuery query{.keys = keys_of(0, 9), .tail_groups = {}, .exact_tails = {}};
  TierDigests digests;
  for (const ChunkKey& key : keys_of(0, 4)) digests[static_cast<std::size_t>(Tier::kHost)].add(key);
  publish(a, full_chunks(0, 4));
  const auto beat = [&](std::uint64_t next_sequence) {
    now_ += kSecond;
    directory_.heartbeat(asker, 1, now_);
    return directory_.heartbeat(a, next_sequence, now_, digests);
  };
  EXPECT_EQ(beat(2), Update::kApplied);
  evict(a, {key_of(2)});  // message 2: the node had sent another key in it, so it still holds this key
  digests[static_cast<std::size_t>(Tier::kHost)].remove(key_of(3));
  EXPECT_EQ(beat(2), Update::kApplied) << "of before: not to be compared";
  EXPECT_EQ(directory_.heartbeat(a, 3, now_), Update::kApplied) << "of a node that tells no digests";
  EXPECT_TRUE(lookup(asker, query)[0].confirmed);
  EXPECT_EQ(beat(3), Update::kRepairWanted);
  EXPECT_EQ(directory_.num_digests_differed(), 1U);
  EXPECT_FALSE(directory_.repair(a).resend_will_do);
  EXPECT_FALSE(lookup(asker, query)[0].confirmed);
  EXPECT_THAT(who_has(asker, query), ElementsAre("a:2")) << "served meanwhile";
  EXPECT_EQ(beat(3), Update::kRepairWanted) << "until one begins";
  directory_.publish(a, 3, SnapshotMark::kBegins, full_chunks(0, 3), now_);
  EXPECT_EQ(beat(4), Update::kApplied);
  directory_.publish(a, 4, SnapshotMark::kEnds, {}, now_);
  EXPECT_EQ(beat(5), Update::kApplied);
  EXPECT_THAT(who_has(asker, query), ElementsAre("a:3"));
  EXPECT_TRUE(lookup(asker, query)[0].confirmed);
  // Differences in which the number of keys is equal, or in which the keys are equal but in another tier.
  directory_.publish(a, 5, SnapshotMark::kReplaces, full_chunks(1, 4), now_);
  EXPECT_EQ(beat(6), Update::kRepairWanted);
  directory_.publish(a, 6, SnapshotMark::kReplaces, full_chunks(0, 3), now_, Tier::kDisk);
  EXPECT_EQ(beat(7), Update::kRepairWanted);
  EXPECT_EQ(directory_.num_digests_differed(), 3U);
}

TEST_F(DirectoryTest, SnapshotsThatDoNotHelpAreAskedForMoreAndMoreRarely) {
  const NodeId a = joined(node_info("a"));
  TierDigests digests;
  digests[0].num_keys = 1;  // this digest differs whatever the node publishes
  std::vector<TimeNs> asked;
  std::uint64_t sequence = 1;
  for (const TimeNs end = now_ + 300 * kSecond; now_ < end; now_ += 500 * kMillisecond) {
    if (directory_.heartbeat(a, sequence, now_, digests) != Update::kRepairWanted) continue;
    asked.push_back(now_);
    directory_.publish(a, sequence++, SnapshotMark::kReplaces, {}, now_);
  }
  ASSERT_GE(asked.size(), 10U);
  EXPECT_LE(asked.size(), 14U);
  EXPECT_LE(asked[1] - asked[0], kSecond);
  EXPECT_GE(asked.back() - asked[asked.size() - 2], 50 * kSecond);
  EXPECT_LE(asked.back() - asked[asked.size() - 2], 52 * kSecond);
  // A lost message leads to a repair at once, and so does a difference after the digests were equal.
  EXPECT_EQ(directory_.publish(a, sequence + 1, SnapshotMark::kNone, {}, now_), Update::kRepairWanted);
  directory_.publish(a, sequence, SnapshotMark::kReplaces, {}, now_);
  directory_.publish(a, sequence + 1, SnapshotMark::kNone, {}, now_);
  EXPECT_EQ(directory_.heartbeat(a, sequence + 2, now_, TierDigests{}), Update::kApplied);
  EXPECT_EQ(directory_.heartbeat(a, sequence + 2, now_, digests), Update::kRepairWanted);
}

TEST_F(DirectoryTest, WhereNotAllFoundRoomDigestsAreNotCompared) {
  const NodeId a = joined(node_info("a"));
  TierDigests digests;
  for (const ChunkKey& key : keys_of(0, 101)) digests[static_cast<std::size_t>(Tier::kHost)].add(key);
  publish(a, full_chunks(0, 101));
  EXPECT_EQ(directory_.heartbeat(a, 2, now_, digests), Update::kApplied);
  directory_.publish(a, 2, SnapshotMark::kReplaces, full_chunks(0, 100), now_);
  EXPECT_EQ(directory_.heartbeat(a, 3, now_, digests), Update::kRepairWanted) << "now there was";
}

TEST_F(DirectoryTest, AnOldMessageIsIgnored) {
  const NodeId asker = joined(node_info("asker"));
  const NodeId a = joined(node_info("a"));
  publish(a, full_chunks(0, 2));  // 1
  evict(a, keys_of(0, 2));        // 2
  EXPECT_EQ(directory_.publish(a, 1, SnapshotMark::kNone, full_chunks(0, 2), now_), Update::kApplied);
  EXPECT_THAT(who_has(asker, {.keys = keys_of(0, 2), .tail_groups = {}, .exact_tails = {}}), IsEmpty());
}

TEST_F(DirectoryTest, SilentNodesExpireAndSpeakingOnesStay) {
  const NodeId a = joined(node_info("a"));
  const NodeId b = joined(node_info("b"));
  publish(a, full_chunks(0, 2));
  for (int i = 0; i < 25; ++i) {
    now_ += 100 * kMillisecond;
    directory_.heartbeat(b, directory_.repair(b).resend_from, now_);
    EXPECT_THAT(directory_.expire(now_), IsEmpty());
  }
  now_ += kMillisecond;
  EXPECT_THAT(directory_.expire(now_), ElementsAre(a));
  EXPECT_THAT(who_has(b, {.keys = keys_of(0, 2), .tail_groups = {}, .exact_tails = {}}), IsEmpty());
  EXPECT_FALSE(directory_.lookup(a, {}, now_));
  EXPECT_EQ(directory_.num_nodes(), 1U);
}

TEST_F(DirectoryTest, ALateLoopGivesEverybodyOneMoreChance) {
  const NodeId a = joined(node_info("a"));
  const NodeId b = joined(node_info("b"));
  EXPECT_THAT(directory_.expire(now_), IsEmpty());
  now_ += 60 * kSecond;  // the loop stood still, so the nodes may have sent heartbeats meanwhile
  EXPECT_THAT(directory_.expire(now_), IsEmpty());
  directory_.heartbeat(a, directory_.repair(a).resend_from, now_);
  now_ += 1000 * kMillisecond;
  EXPECT_THAT(directory_.expire(now_), IsEmpty());
  now_ += kMillisecond;
  EXPECT_THAT(directory_.expire(now_), ElementsAre(b));
}

TEST_F(DirectoryTest, MemoryIsBoundedPerNodeAndOverAll) {
  const NodeId a = joined(node_info("a"));
  const NodeId b = joined(node_info("b"));
  publish(a, full_chunks(0, 120));
  EXPECT_EQ(directory_.num_chunks(), 100U);
  publish(b, full_chunks(0, 60));
  EXPECT_EQ(directory_.num_chunks(), 150U);
  EXPECT_EQ(directory_.num_chunks_dropped(), 30U);
  publish(a, full_chunks(0, 10));  // these chunks are already known, so none is dropped
  EXPECT_EQ(directory_.num_chunks_dropped(), 30U);
  // A snapshot of known chunks needs no additional room. A snapshot with more chunks gets only the room that is left.
  directory_.publish(a, directory_.repair(a).resend_from, SnapshotMark::kBegins, full_chunks(0, 100), now_);
  EXPECT_EQ(directory_.num_chunks_dropped(), 30U);
  EXPECT_EQ(directory_.num_chunks(), 150U);
  publish(b, full_chunks(60, 61));
  EXPECT_EQ(directory_.num_chunks_dropped(), 31U);
  directory_.publish(a, directory_.repair(a).resend_from, SnapshotMark::kEnds, {}, now_);
  EXPECT_EQ(directory_.num_chunks(), 150U);
  directory_.leave(a);
  EXPECT_EQ(directory_.num_chunks(), 50U);
  for (int i = 0; i < 7; ++i) ASSERT_TRUE(directory_.join(node_info("n" + std::to_string(i)), 0, now_));
  const Result<Joined> ninth = directory_.join(node_info("ninth"), 0, now_);
  ASSERT_FALSE(ninth);
  EXPECT_EQ(ninth.error().code, ErrorCode::kFull);
}

TEST_F(DirectoryTest, RefusesFieldsThatAreEmptyTooLongOrNotPrintable) {
  EXPECT_EQ(directory_.join(node_info(""), 0, now_).error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(directory_.join(node_info(std::string(257, 'x')), 0, now_).error().code, ErrorCode::kInvalidArgument);
  const Result<Joined> forged = directory_.join(node_info("a\nb"), 0, now_);
  ASSERT_FALSE(forged);
  EXPECT_THAT(forged.error().what, HasSubstr("engine_id"));
  for (const NodeDetail& detail : kNodeDetails) {
    NodeInfo info = node_info("a");
    info.details.*detail.text = std::string(detail.bytes_max + 1, 'x');
    EXPECT_THAT(directory_.join(info, 0, now_).error().what, HasSubstr(detail.name));
  }
}

TEST_F(DirectoryTest, StatusTellsEachNode) {
  const NodeId a = joined(node_info("a", 5));
  publish(a, full_chunks(0, 2));
  publish(a, {tail_chunk(10, 50)});
  const std::vector<NodeStatus> status = directory_.status(now_ + 40 * kMillisecond);
  ASSERT_EQ(status.size(), 1U);
  EXPECT_EQ(status[0].engine_id.value, "a");
  EXPECT_EQ(status[0].incarnation.value, 5U);
  EXPECT_EQ(status[0].num_chunks, 3U);
  EXPECT_EQ(status[0].num_tails, 1U);
  EXPECT_EQ(status[0].heartbeat_age_ms, 40U);
}

}  // namespace
}  // namespace kvferry::controller
