// Tests prompts that are handed off while a push to this node is in progress. However the push ends, the core fetches
// the missing chunks from the prefill node.
#include <gmock/gmock.h>

#include "core_bench.h"

namespace kvferry::sim {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

/// The core of the decode node, without a directory. The test plays the prefill node and the workers.
class HandingOff : public CoreBench {
 protected:
  HandingOff() : CoreBench(sizes(16, 16, 8)) {
    TokenChain chain(root_key("model", ""), 16, {});
    chain.append(std::span(tokens_).first(20));
    keys_ = {chain.key(0), chain.tail_key(1, 4)};
  }
  /// Offers the first `num` chunks of the prompt in a push, all of which the core grants.
  void push(std::size_t num) {
    PushOffer offer{"model", 1, {}, {{keys_[0], 16, {}}, {keys_[1], 4, {}}}};
    offer.chunks.resize(num);
    reservation_ = core_->push_offered("p", offer, now_).reservation;
    EXPECT_NE(reservation_, 0u);
  }
  void hand_off() {
    NewRequest added = request("r", 20);
    added.source = HandoffSource{"tcp://p:1", "p-r", 20};
    core_->add_request(added, now_);
  }
  RequestLease asked() {
    const std::vector<RequestLease> leases = take<RequestLease>();
    EXPECT_THAT(leases, SizeIs(1));
    EXPECT_EQ(leases.at(0).request.handoff, "p-r");
    return leases.at(0);
  }
  void answer(const RequestLease& wanted) {
    LeaseReply reply{9, {}, {}};
    for (std::uint32_t i = 0; i < wanted.request.keys.size(); ++i)
      reply.chunks.push_back({i, {i, 1}, wanted.request.keys[i] == keys_[0] ? 16u : 4u, {5}});
    core_->lease_answered(wanted.fetch, wanted.endpoint, reply, now_);
  }
  void pull_all() {
    const std::vector<StartPull> pulls = take<StartPull>();
    ASSERT_THAT(pulls, SizeIs(1));
    core_->pull_done(pulls[0].pull, 0, std::vector(pulls[0].items.size(), true), now_);
  }
  void push_fails(std::uint32_t index) {
    core_->push_settled({reservation_, {{index, false, 0, {}}}}, now_);
    core_->push_revoked(take<RevokeSlots>().at(0), now_);
  }
  /// Lets the deadline of the push pass without a settlement.
  void push_runs_out_of_time() {
    core_->tick(now_ += 1100 * kMillisecond);
    const std::vector<RevokeSlots> revoked = take<RevokeSlots>();
    ASSERT_THAT(revoked, SizeIs(1));
    core_->push_revoked(revoked[0], now_);
  }

  std::vector<ChunkKey> keys_;
  std::uint64_t reservation_ = 0;
};

TEST_F(HandingOff, TheSourceIsAskedAgainIfAPushTakesTheSlotsOfWhatItLeasesAndFails) {
  hand_off();
  const RequestLease first = asked();
  push(2);
  answer(first);
  EXPECT_THAT(take<StartPull>(), IsEmpty()) << "the push writes the chunks";
  EXPECT_TRUE(lookup("r").pending);
  push_runs_out_of_time();
  EXPECT_TRUE(lookup("r").pending);
  const RequestLease again = asked();
  EXPECT_EQ(again.request.keys, keys_);
  answer(again);
  pull_all();
  EXPECT_EQ(lookup("r").num_external, 19u);
}

TEST_F(HandingOff, TheSourceIsAskedAgainForThePushedPartIfItGaveTheOther) {
  push(1);
  hand_off();
  const RequestLease first = asked();
  EXPECT_THAT(first.request.keys, ElementsAre(keys_[1]));
  answer(first);
  pull_all();
  EXPECT_TRUE(lookup("r").pending);
  push_runs_out_of_time();
  EXPECT_TRUE(lookup("r").pending);
  const RequestLease again = asked();
  EXPECT_THAT(again.request.keys, ElementsAre(keys_[0]));
  answer(again);
  pull_all();
  EXPECT_EQ(lookup("r").num_external, 19u);
}

TEST_F(HandingOff, TheFirstLeaseIsReleasedOnlyWhenTheSourceIsNotNeededAnyMore) {
  push(1);
  hand_off();
  answer(asked());
  pull_all();
  EXPECT_THAT(take<ReleaseLease>(), IsEmpty()) << "with its release the source would unpin the pushed part too";
  push_runs_out_of_time();
  EXPECT_TRUE(lookup("r").pending);
  const RequestLease again = asked();
  LeaseReply reply{10, {}, {{0, {0, 1}, 16, {5}}}};
  core_->lease_answered(again.fetch, again.endpoint, reply, now_);
  pull_all();
  const std::vector<ReleaseLease> released = take<ReleaseLease>();
  ASSERT_THAT(released, SizeIs(2));
  EXPECT_EQ(released[0].lease + released[1].lease, 9u + 10u);
}

TEST_F(HandingOff, AKeptLeaseIsReleasedWhenThePushSucceedsOrTheRequestEnds) {
  for (const bool succeeds : {true, false}) {
    push(1);
    hand_off();
    answer(asked());
    pull_all();
    EXPECT_THAT(take<ReleaseLease>(), IsEmpty());
    if (succeeds) {
      core_->push_settled({reservation_, {{0, true, 0, {5}}}}, now_);
      core_->push_revoked(take<RevokeSlots>().at(0), now_);
      core_->allocated(RequestId{"r"}, lookup("r").num_external, {blocks(1, 2)}, now_);
      EXPECT_THAT(take<ReleaseLease>(), SizeIs(1));
      build();
    }
    core_->finished(RequestId{"r"}, 20, {blocks(1, 2)}, !succeeds, now_);
    EXPECT_THAT(take<ReleaseLease>(), SizeIs(succeeds ? 0 : 1));
    core_->reset_cache();
    core_->tick(now_ += 120 * kSecond);
    for (const RevokeSlots& one : take<RevokeSlots>()) core_->push_revoked(one, now_);
  }
}

TEST_F(HandingOff, TheSourceIsAskedAgainWhenEveryPartOfAPushHasFailed) {
  push(2);
  hand_off();
  push_fails(0);
  EXPECT_TRUE(lookup("r").pending);
  EXPECT_THAT(take<RequestLease>(), IsEmpty()) << "the rest of the push is still under way";
  push_fails(1);
  EXPECT_TRUE(lookup("r").pending);
  const RequestLease wanted = asked();
  EXPECT_EQ(wanted.request.keys, keys_);
  answer(wanted);
  pull_all();
  EXPECT_EQ(lookup("r").num_external, 19u);
}

TEST_F(HandingOff, TheSourceIsNotAskedAgainForWhatItLacks) {
  push(1);
  hand_off();
  const RequestLease first = asked();
  core_->lease_answered(first.fetch, first.endpoint, {}, now_);
  EXPECT_TRUE(lookup("r").pending);
  EXPECT_THAT(take<RequestLease>(), IsEmpty()) << "the push is still under way";
  push_runs_out_of_time();
  EXPECT_TRUE(lookup("r").pending);
  const RequestLease again = asked();
  core_->lease_answered(again.fetch, again.endpoint, {}, now_);
  EXPECT_FALSE(lookup("r").pending);
  EXPECT_THAT(take<RequestLease>(), IsEmpty());
}

}  // namespace
}  // namespace kvferry::sim
