// Tests this node as a holder: leases, and prompts that wait for their decode worker.
#include <gmock/gmock.h>

#include "core_bench.h"

namespace kvferry::sim {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

class Holding : public CoreBench {
 protected:
  Holding() : CoreBench(sizes(16, 16, 4)) {}
  LeaseRequest request_for(std::size_t num_chunks, const std::string& handoff = {}) {
    TokenChain chain(root_key("model", ""), 16, {});
    chain.append(std::span(tokens_).first(num_chunks * 16));
    return {"model", {chain.keys().begin(), chain.keys().end()}, handoff};
  }
  /// Runs a prefill with a handoff, which computes 40 tokens.
  FinishedRequest prefill(const std::string& id) {
    NewRequest added = request(id, 40);
    added.handoff = true;
    core_->add_request(added, now_);
    const std::uint32_t have = lookup(id).num_external;
    core_->allocated(RequestId{id}, have, {blocks(1, 3)}, now_);
    build({{{RequestId{id}, have, 40 - have, BlockTable{blocks(1, 3)}}}, {}});
    core_->update_tokens(RequestId{id}, 40, std::span(tokens_).subspan(40, 1));
    return core_->finished(RequestId{id}, 40, {blocks(1, 3)}, false, now_);
  }
};

TEST_F(Holding, ALeaseHoldsWhatIsThereUntilItIsGivenBack) {
  cache(32);
  const LeaseReply reply = core_->lease_requested("reader", request_for(3), now_);
  ASSERT_THAT(reply.chunks, SizeIs(2));  // two of three chunks
  EXPECT_NE(reply.lease, 0u);
  EXPECT_EQ(reply.chunks[1].index, 1u);
  EXPECT_EQ(reply.chunks[1].num_tokens, 16u);
  EXPECT_EQ(core_->pool().num_pinned(), 2u);
  core_->lease_released(reply.lease);
  EXPECT_EQ(core_->pool().num_pinned(), 0u);
  core_->lease_released(reply.lease);  // the same message again
}

TEST_F(Holding, NothingIsLeasedWhereNothingIs) {
  const LeaseReply reply = core_->lease_requested("reader", request_for(3), now_);
  EXPECT_EQ(reply.lease, 0u);
  EXPECT_THAT(reply.refused, IsEmpty());
  EXPECT_EQ(core_->counters().leases_granted, 0u);
}

TEST_F(Holding, AnUnknownPeerWhoAsksWithoutEndPinsSoMuchAndNoMore) {
  cache(64);
  LeaseRequest request = request_for(4);
  for (int i = 0; i < 100; ++i) request.keys.push_back(request.keys[0]);
  EXPECT_THAT(core_->lease_requested("reader", request, now_).chunks, SizeIs(4)) << "no more than the pool has";
  std::size_t num_leases = 1;
  while (core_->lease_requested("reader", request_for(4), now_).refused.empty() && num_leases < 1 << 20) ++num_leases;
  EXPECT_EQ(num_leases, (1u << 20) / 4);
  EXPECT_EQ(core_->counters().leases_refused, 1u);
  core_->tick(now_ += 31 * kSecond);
  EXPECT_EQ(core_->pool().num_pins(), 0u);
  const LeaseReply reply = core_->lease_requested("reader", request_for(4), now_);
  EXPECT_THAT(reply.chunks, SizeIs(4));
  core_->lease_released(reply.lease);
  EXPECT_EQ(core_->pool().num_pins(), 0u);
}

TEST_F(Holding, AnotherModelIsRefusedWithASentence) {
  cache(32);
  LeaseRequest other = request_for(2);
  other.fingerprint = "another model";
  const LeaseReply reply = core_->lease_requested("reader", other, now_);
  EXPECT_THAT(reply.refused, HasSubstr("the fingerprint is 'model' here and 'another model' there"));
  EXPECT_THAT(reply.chunks, IsEmpty());
}

TEST_F(Holding, ADeadReadersLeaseEndsByItself) {
  cache(32);
  core_->lease_requested("reader", request_for(2), now_);
  core_->tick(now_ += 29 * kSecond);
  EXPECT_EQ(core_->pool().num_pinned(), 2u);
  core_->tick(now_ += kSecond);
  EXPECT_EQ(core_->pool().num_pinned(), 0u);
  EXPECT_EQ(core_->counters().pins_expired, 1u);
}

TEST_F(Holding, WhatIsBeingWrittenIsNotLeased) {
  add("a", 16);
  core_->allocated(RequestId{"a"}, 0, {blocks(1, 1)}, now_);
  const StepPlan plan = core_->build_step({{{RequestId{"a"}, 0, 16, BlockTable{blocks(1, 1)}}}, {}}, now_);
  EXPECT_EQ(core_->lease_requested("reader", request_for(1), now_).lease, 0u);
  core_->worker_report(well_done(plan), now_);
  EXPECT_NE(core_->lease_requested("reader", request_for(1), now_).lease, 0u);
}

TEST_F(Holding, AForeignNumberReleasesNoHoldOfOurOwn) {
  cache(32);
  add("a", 48);
  EXPECT_EQ(lookup("a").num_external, 32u);
  const std::size_t pins = core_->pool().num_pins();
  for (std::uint64_t number = 0; number < 50; ++number) core_->lease_released(number);
  EXPECT_EQ(core_->pool().num_pins(), pins);
}

TEST_F(Holding, NobodyReleasesALeaseThatAnotherGot) {
  cache(32);
  const std::uint64_t own = core_->lease_requested("liar", request_for(2), now_).lease;
  const std::uint64_t other = core_->lease_requested("reader", request_for(2), now_).lease;
  for (std::uint64_t step = 1; step <= 1000; ++step)
    for (const std::uint64_t guess : {step, own + step, own - step}) core_->lease_released(guess);
  core_->lease_released(own);
  core_->lease_released(own);  // again
  EXPECT_EQ(core_->pool().num_pins(), 1u);
  EXPECT_EQ(core_->counters().unknown_releases, 3001u);
  core_->lease_released(other);
  EXPECT_EQ(core_->pool().num_pins(), 0u);
  EXPECT_EQ(core_->counters().unknown_releases, 3001u);
}

TEST_F(Holding, AFinishedPrefillWaitsForItsDecodeWorker) {
  const FinishedRequest done = prefill("p");
  EXPECT_TRUE(done.handoff);
  EXPECT_EQ(done.handoff_tokens, 40u);
  EXPECT_EQ(core_->pool().num_pinned(), 3u);  // two chunks and the tail
  const LeaseReply reply = core_->lease_requested("decode", request_for(2, done.handoff_name), now_);
  core_->lease_released(reply.lease);
  EXPECT_EQ(core_->pool().num_pins(), 0u);  // with the lease the handoff's hold ends
  EXPECT_EQ(core_->counters().unknown_handoffs, 0u);
}

TEST_F(Holding, NobodyEndsAHandOffThatAnotherGot) {
  const std::string name = prefill("p").handoff_name, own = prefill("q").handoff_name;
  std::string next = name;
  next.back() = next.back() == '0' ? '1' : '0';
  const std::string proof = name.substr(1), own_proof = own.substr(1);
  for (const std::string& guess : {std::string("p"), std::string("p."), "p" + own_proof, proof, next, name + "0"})
    core_->lease_released(core_->lease_requested("liar", request_for(2, guess), now_).lease);
  EXPECT_EQ(core_->pool().num_pins(), 2u);
  EXPECT_EQ(core_->counters().unknown_handoffs, 6u);
  core_->lease_released(core_->lease_requested("decode", request_for(2, name), now_).lease);
  EXPECT_EQ(core_->pool().num_pins(), 1u);
  core_->lease_released(core_->lease_requested("decode", request_for(2, name), now_).lease);
  EXPECT_EQ(core_->pool().num_pins(), 1u);
  EXPECT_EQ(core_->counters().unknown_handoffs, 7u) << "its pin has ended";
}

TEST_F(Holding, TheNameOfAHandOffEndsNoLaterOneOfTheSameId) {
  const std::string first = prefill("p").handoff_name;
  const std::uint64_t lease = core_->lease_requested("decode", request_for(2, first), now_).lease;
  EXPECT_NE(prefill("p").handoff_name, first);
  core_->lease_released(lease);
  EXPECT_EQ(core_->pool().num_pins(), 1u);
}

TEST_F(Holding, APrefillThatNobodyFetchesIsHeldNoLongerThanItsTime) {
  prefill("p");
  core_->tick(now_ += 59 * kSecond);
  EXPECT_EQ(core_->pool().num_pinned(), 3u);
  core_->tick(now_ += 2 * kSecond);
  EXPECT_EQ(core_->pool().num_pinned(), 0u);
}

TEST_F(Holding, AnExpiredLeaseLeavesTheHandOffToItsOwnDeadline) {
  core_->lease_requested("decode", request_for(2, prefill("p").handoff_name), now_);
  core_->tick(now_ += 31 * kSecond);
  EXPECT_EQ(core_->pool().num_pins(), 1u);
  core_->tick(now_ += 30 * kSecond);
  EXPECT_EQ(core_->pool().num_pins(), 0u);
}

TEST_F(Holding, AnIdUsedAgainReplacesTheHandOffOfTheFirst) {
  prefill("p");
  prefill("p");
  EXPECT_EQ(core_->pool().num_pins(), 1u);
}

TEST_F(Holding, AnAbortedPrefillIsHandedToNobody) {
  NewRequest added = request("p", 40);
  added.handoff = true;
  core_->add_request(added, now_);
  compute("p", 40, blocks(1, 3));
  EXPECT_FALSE(core_->finished(RequestId{"p"}, 40, {blocks(1, 3)}, true, now_).handoff);
  EXPECT_EQ(core_->pool().num_pins(), 0u);
}

TEST_F(Holding, ARestartedHolderTakesNoLeaseOfItsPastLifeForOneOfItsOwn) {
  cache(32);
  const std::uint64_t before = core_->lease_requested("reader", request_for(2), now_).lease;
  CoreConfig again = sizes(16, 16, 4);
  again.secret = "of another start";
  core_.emplace(again);
  core_->set_directory_up(false);
  cache(32);
  core_->lease_requested("reader", request_for(2), now_);
  core_->lease_released(before);
  EXPECT_EQ(core_->pool().num_pinned(), 2u);
}

}  // namespace
}  // namespace kvferry::sim
