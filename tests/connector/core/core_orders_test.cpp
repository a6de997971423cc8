// Tests the controller's orders for a pool: pin, unpin, evict, replicate.
#include <gmock/gmock.h>

#include <limits>

#include "core_bench.h"

namespace kvferry::sim {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

class Orders : public CoreBench {
 protected:
  Orders() : Orders(sizes(16, 16, 8)) {}
  explicit Orders(const CoreConfig& config) : CoreBench(config) {}
  static constexpr std::uint64_t kHold = 5;

  std::vector<ChunkKey> keys(std::size_t num_chunks) {
    TokenChain chain(root_key("model", ""), 16, {});
    chain.append(std::span(tokens_).first(num_chunks * 16));
    return {chain.keys().begin(), chain.keys().end()};
  }
  ReplicateOrder fetch_of(std::size_t num_chunks, TimeNs ttl = 10 * kSecond) {
    ReplicateOrder order{"tcp://far", {}, ttl};
    for (const ChunkKey& key : keys(num_chunks)) order.chunks.push_back({key, 0, false, {}});
    return order;
  }
  static LeaseReply grant(const RequestLease& wanted, std::uint64_t lease) {
    LeaseReply reply;
    reply.lease = lease;
    for (std::uint32_t i = 0; i < wanted.request.keys.size(); ++i) reply.chunks.push_back({i, {i, 1}, 16, {5}});
    return reply;
  }
  /// Answers leases and pulls until the core sends no more requests. Returns how many chunks were pulled.
  std::size_t carry_out() {
    std::size_t num_pulled = 0;
    for (std::vector<Action> actions = core_->take_actions(); !actions.empty(); actions = core_->take_actions()) {
      for (const Action& action : actions) {
        if (const auto* lease = std::get_if<RequestLease>(&action))
          core_->lease_answered(lease->fetch, lease->endpoint, grant(*lease, ++last_lease_), now_);
        if (const auto* pull = std::get_if<StartPull>(&action)) {
          num_pulled += pull->items.size();
          core_->pull_done(pull->pull, 0, std::vector<bool>(pull->items.size(), true), now_);
        }
        if (std::holds_alternative<ReleaseLease>(action)) ++num_released_;
        if (const auto* published = std::get_if<PublishChunks>(&action)) num_published_ += published->chunks.size();
      }
    }
    return num_pulled;
  }
  std::uint64_t last_lease_ = 0;
  std::size_t num_released_ = 0, num_published_ = 0;
};

TEST_F(Orders, WhatIsKeptOutlivesAFloodAndGoesWithItsOrder) {
  cache(32);
  core_->pin_ordered(kHold, keys(3), kSecond * 60, now_);  // the third chunk is not in the pool
  EXPECT_EQ(core_->pool().num_pinned(), 2u);
  for (int i = 0; i < 3; ++i) {  // saves more other chunks than the pool can hold
    std::iota(tokens_.begin(), tokens_.end(), 1000 * (i + 1));
    cache(64);
  }
  std::iota(tokens_.begin(), tokens_.end(), 100);
  for (const ChunkKey& key : keys(2)) EXPECT_NE(core_->pool().find(key), nullptr);
  core_->unpin_ordered(kHold);
  core_->unpin_ordered(kHold);  // the same message again
  EXPECT_EQ(core_->pool().num_pinned(), 0u);
  EXPECT_EQ(core_->num_controller_pinned(), 0u);
}

TEST_F(Orders, KeepingEndsAtItsDeadline) {
  cache(32);
  core_->pin_ordered(kHold, keys(1), kSecond, now_);
  core_->pin_ordered(kHold, keys(2), 3 * kSecond, now_);  // this order pins chunks in addition to the first one
  EXPECT_EQ(core_->num_controller_pinned(), 3u);
  core_->tick(now_ += kSecond);
  EXPECT_EQ(core_->num_controller_pinned(), 2u);
  core_->tick(now_ += 2 * kSecond);
  EXPECT_EQ(core_->num_controller_pinned(), 0u);
  EXPECT_EQ(core_->pool().num_pinned(), 0u);
}

TEST_F(Orders, HalfOfThePoolStaysFreeWhateverIsAsked) {
  cache(6 * 16);
  core_->take_actions();
  core_->pin_ordered(kHold, keys(6), kSecond * 60, now_);
  EXPECT_EQ(core_->pool().num_pinned(), 4u);  // half of the pool's 8 slots
  EXPECT_EQ(core_->counters().pins_refused, 2u);
  const std::vector<LogLine> lines = take<LogLine>();
  ASSERT_THAT(lines, SizeIs(1));
  EXPECT_THAT(lines[0].text, HasSubstr("2 of 6 chunks that the controller ordered to pin are not pinned"));
  core_->pin_ordered(kHold + 1, keys(1), kSecond * 60, now_);
  EXPECT_EQ(core_->num_controller_pinned(), 4u);
}

TEST_F(Orders, AKeepOfNoTimeIsNone) {
  cache(32);
  core_->pin_ordered(kHold, keys(2), 0, now_);
  core_->pin_ordered(kHold, keys(2), -1, now_);
  EXPECT_EQ(core_->pool().num_pinned(), 0u);
}

TEST_F(Orders, WhatIsDroppedIsAnnouncedAndWhatIsReadGoesAfterwards) {
  cache(48);
  const LeaseReply lease = core_->lease_requested("reader", {"model", {keys(3)[2]}, {}}, now_);
  core_->take_actions();
  core_->evict_ordered(keys(4));
  const std::vector<AnnounceEvictions> evicted = take<AnnounceEvictions>();
  ASSERT_THAT(evicted, SizeIs(1));
  EXPECT_THAT(evicted[0].keys, SizeIs(3));
  EXPECT_EQ(core_->pool().num_pinned(), 1u);
  EXPECT_EQ(core_->pool().find(keys(3)[2]), nullptr);
  core_->lease_released(lease.lease);
  EXPECT_EQ(core_->pool().num_pinned(), 0u);
}

TEST_F(Orders, ALengthThatNoChunkCanHaveIsNotCopied) {
  TokenChain chain(root_key("model", ""), 16, {});
  chain.append(std::span(tokens_).first(40));
  const ChunkKey group = *chain.tail_group(0);
  ReplicateOrder order{"tcp://far", {}, 10 * kSecond};
  order.chunks.push_back({chain.key(0), 16, true, group});  // a tail that is as long as a full chunk
  order.chunks.push_back({chain.key(1), 0, true, group});
  order.chunks.push_back({keys(3)[2], 17, true, group});
  core_->replicate_ordered(order, now_);
  for (const RequestLease& lease : take<RequestLease>()) {
    LeaseReply reply{1, {}, {}};
    for (std::uint32_t i = 0; i < lease.request.keys.size(); ++i)
      reply.chunks.push_back({i, {i, 1}, order.chunks[i].num_tokens, {5}});
    core_->lease_answered(lease.fetch, lease.endpoint, reply, now_);
  }
  for (const StartPull& pull : take<StartPull>())
    core_->pull_done(pull.pull, 0, std::vector<bool>(pull.items.size(), true), now_);
  add("r", 40);
  EXPECT_EQ(lookup("r").num_external, 0u);
  EXPECT_EQ(core_->counters().mislabeled_chunks, 3u);
}

class LargeOrders : public Orders {
 protected:
  LargeOrders() : Orders(sizes(16, 16, 128)) {}
};

TEST_F(LargeOrders, AFetchComesPieceByPieceAndIsPublished) {
  cache(32);
  core_->take_actions();
  core_->replicate_ordered(fetch_of(80), now_);
  EXPECT_EQ(core_->num_replications(), 1u);
  EXPECT_EQ(carry_out(), 78u);  // two chunks were already in the pool
  EXPECT_EQ(num_published_, 78u);
  EXPECT_EQ(num_released_, 3u);  // each lease was for up to 32 chunks
  EXPECT_EQ(core_->num_replications(), 0u);
  for (const ChunkKey& key : keys(80)) ASSERT_NE(core_->pool().find(key), nullptr);
}

TEST_F(LargeOrders, WhatNoSlotCouldHoldIsNotFetchedAndNoDeadlineOverflows) {
  ReplicateOrder order = fetch_of(2, std::numeric_limits<TimeNs>::max());
  order.chunks[0].is_tail = true;
  order.chunks[0].num_tokens = 17;
  core_->replicate_ordered(order, now_);
  EXPECT_EQ(carry_out(), 1u);
}

TEST_F(LargeOrders, OneOrderAfterTheOther) {
  core_->replicate_ordered(fetch_of(40), now_);
  core_->replicate_ordered(fetch_of(50), now_);
  EXPECT_THAT(take<RequestLease>(), SizeIs(1));
  EXPECT_EQ(core_->num_replications(), 2u);
}

TEST_F(LargeOrders, ADeadHolderEndsAFetchAndAvoidsTheNextFromThere) {
  core_->replicate_ordered(fetch_of(40), now_);
  core_->replicate_ordered(fetch_of(40), now_);
  const std::vector<RequestLease> wanted = take<RequestLease>();
  ASSERT_THAT(wanted, SizeIs(1));
  core_->tick(now_ += kSecond);
  EXPECT_EQ(core_->num_replications(), 0u);
  EXPECT_EQ(core_->counters().fetch_timeouts, 1u);
  // this answer comes too late, so its lease is released
  core_->lease_answered(wanted[0].fetch, wanted[0].endpoint, grant(wanted[0], 9), now_);
  EXPECT_THAT(take<ReleaseLease>(), SizeIs(1));
  EXPECT_EQ(core_->pool().num_writing(), 0u);
}

TEST_F(LargeOrders, AFetchEndsAtItsDeadline) {
  core_->replicate_ordered(fetch_of(80, kSecond / 2), now_);
  const std::vector<RequestLease> wanted = take<RequestLease>();
  now_ += kSecond / 2;
  core_->lease_answered(wanted.at(0).fetch, wanted.at(0).endpoint, grant(wanted.at(0), 9), now_);
  EXPECT_EQ(carry_out(), 32u);  // the chunks of the lease that came in time
  EXPECT_EQ(core_->num_replications(), 0u);
}

TEST_F(LargeOrders, AnAnswerOfANodeThatWasNotAskedIsNotTaken) {
  core_->replicate_ordered(fetch_of(40), now_);
  const RequestLease wanted = take<RequestLease>().at(0);
  core_->lease_answered(wanted.fetch, "tcp://liar", grant(wanted, 9), now_);
  EXPECT_THAT(take<StartPull>(), IsEmpty());
  core_->lease_answered(wanted.fetch, wanted.endpoint, grant(wanted, 9), now_);
  EXPECT_EQ(carry_out(), 40u);
}

TEST_F(LargeOrders, AHolderThatHasNothingOrRefusesIsAskedForTheRest) {
  core_->replicate_ordered(fetch_of(40), now_);
  RequestLease wanted = take<RequestLease>().at(0);
  core_->lease_answered(wanted.fetch, wanted.endpoint, {}, now_);  // the holder has evicted the chunks
  wanted = take<RequestLease>().at(0);
  EXPECT_THAT(wanted.request.keys, SizeIs(8));
  LeaseReply refusal;
  refusal.refused = "another model";
  core_->lease_answered(wanted.fetch, wanted.endpoint, refusal, now_);
  EXPECT_EQ(core_->num_replications(), 0u);
  EXPECT_THAT(take<StartPull>(), IsEmpty());
}

TEST_F(LargeOrders, APullThatComesTooLateIsStillTakenAndTheNextPieceIsNotConfused) {
  core_->replicate_ordered(fetch_of(40), now_);
  const RequestLease wanted = take<RequestLease>().at(0);
  core_->lease_answered(wanted.fetch, wanted.endpoint, grant(wanted, 9), now_);
  const StartPull pull = take<StartPull>().at(0);
  core_->tick(now_ += 6 * kSecond);
  EXPECT_EQ(core_->counters().fetch_timeouts, 1u);
  core_->tick(now_ += kSecond);
  EXPECT_THAT(take<RequestLease>(), IsEmpty()) << "one piece at a time: the ranks still write the slots of the first";
  core_->pull_done(pull.pull, 0, std::vector<bool>(32, true), now_);
  EXPECT_NE(core_->pool().find(keys(1)[0]), nullptr);
  EXPECT_THAT(take<RequestLease>().at(0).request.keys, SizeIs(8));
  EXPECT_EQ(core_->num_replications(), 1u);
}

TEST_F(LargeOrders, AnOrderEndsAtItsDeadlineThoughItsPullIsOverdueAndTheNextOneWaitsForThatPull) {
  core_->replicate_ordered(fetch_of(40), now_);
  core_->replicate_ordered(fetch_of(50, 60 * kSecond), now_);
  const RequestLease wanted = take<RequestLease>().at(0);
  core_->lease_answered(wanted.fetch, wanted.endpoint, grant(wanted, 9), now_);
  const StartPull pull = take<StartPull>().at(0);
  core_->tick(now_ += 11 * kSecond);
  EXPECT_EQ(core_->num_replications(), 1u);
  EXPECT_THAT(take<RequestLease>(), IsEmpty());
  core_->pull_done(pull.pull, 0, std::vector<bool>(32, true), now_);
  EXPECT_EQ(carry_out(), 18u);
  EXPECT_EQ(core_->num_replications(), 0u);
}

TEST_F(LargeOrders, ARequestFindsWhatAnOrderReplicates) {
  core_->replicate_ordered(fetch_of(4), now_);
  const RequestLease wanted = take<RequestLease>().at(0);
  core_->lease_answered(wanted.fetch, wanted.endpoint, grant(wanted, 9), now_);
  const StartPull pull = take<StartPull>().at(0);
  add("a", 65);
  EXPECT_TRUE(lookup("a").pending);  // the chunk is being pulled
  core_->pull_done(pull.pull, 0, std::vector<bool>(4, true), now_);
  EXPECT_EQ(lookup("a").num_external, 64u);
}

}  // namespace
}  // namespace kvferry::sim
