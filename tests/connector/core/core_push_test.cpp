// Tests pushes: what the prefill node offers, moves and settles, and what the decode node reserves, grants and revokes.
#include <tuple>

#include "push_bench.h"

namespace kvferry::sim {
namespace {

using ::testing::ElementsAre;
using ::testing::FieldsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr auto kDeclined = static_cast<std::uint8_t>(PushVerdict::kDeclined);
constexpr auto kPresent = static_cast<std::uint8_t>(PushVerdict::kPresent);
constexpr auto kGranted = static_cast<std::uint8_t>(PushVerdict::kGranted);

class Sending : public PushBench {
 protected:
  /// Lets a request pull the prompt's first chunk from another node.
  StartPull start_pull() {
    core_->set_directory_up(true);
    add("a", 17);
    core_->directory_answered(take<QueryDirectory>().at(0).fetch, {{"tcp://far", 1, {}}}, now_);
    core_->lease_answered(take<RequestLease>().at(0).fetch, "tcp://far", {9, {}, {{0, {0, 1}, 16, {5}}}}, now_);
    return take<StartPull>().at(0);
  }
  void moved(std::uint64_t push, std::uint32_t index, bool ok = true, std::uint32_t rank = 0) {
    core_->chunk_push_ended({push, rank, index, ok, {}}, now_);
  }
};

TEST_F(Sending, OffersThePromptAndItsTailWhenTheRequestComes) {
  const OfferPush offered = offer("r", 40);
  ASSERT_THAT(offered.offer.chunks, SizeIs(3));
  EXPECT_EQ(offered.offer.chunks[0].num_tokens, 16u);
  EXPECT_EQ(offered.offer.chunks[2].num_tokens, 8u);
  EXPECT_EQ(offered.offer.fingerprint, "model");
  EXPECT_EQ(offered.endpoint, "tcp://decode:1");
}

TEST_F(Sending, SettlesAChunkWhenItIsMovedAndVerifiedHere) {
  const OfferPush offered = offer("r", 32);
  answer(offered, {kGranted, kGranted});
  const StepPlan plan = prefill("r", 32, false);
  ASSERT_THAT(plan.saves_after, SizeIs(2));
  EXPECT_EQ(plan.saves_after[0].items[0].push, offered.push);
  EXPECT_EQ(plan.saves_after[1].items[0].push_index, 1u);
  moved(offered.push, 0);
  EXPECT_THAT(settled(), IsEmpty()) << "the save is not reported yet";
  core_->worker_report(well_done(plan), now_);
  const auto first = settled();
  ASSERT_THAT(first, SizeIs(1));
  EXPECT_TRUE(first[0].ok);
  EXPECT_THAT(first[0].checksums, ElementsAre(1u));
  now_ += 3 * kMillisecond;
  moved(offered.push, 1);
  EXPECT_THAT(settled(), SizeIs(1));
  EXPECT_EQ(core_->num_pushes(), 0u);
  EXPECT_EQ(core_->pool().num_pinned(), 0u);
  EXPECT_EQ(core_->counters().pushed_chunks, 2u);
  const RequestLife ended = core_->recorder().transfers_after(0, now_).at(0);
  EXPECT_EQ(ended.request, "r");
  EXPECT_THAT(std::tuple(ended.events[0].tokens, ended.events[0].chunks, ended.events[0].wire),
              FieldsAre(32, 2, 3 * kMillisecond));
}

TEST_F(Sending, WhatIsThereNeedsNoHandOff) {
  const OfferPush offered = offer("r", 32);
  answer(offered, {kGranted, kPresent});
  prefill("r", 32);
  core_->finished(RequestId{"r"}, 32, {blocks(1, 2)}, false, now_);
  EXPECT_EQ(core_->pool().num_pinned(), 2u);
  moved(offered.push, 0);
  EXPECT_EQ(core_->pool().num_pinned(), 0u);
}

TEST_F(Sending, WhatIsPulledLaterIsHeldForIt) {
  const OfferPush offered = offer("r", 32);
  answer(offered, {kGranted, kDeclined});
  prefill("r", 32);
  core_->finished(RequestId{"r"}, 32, {blocks(1, 2)}, false, now_);
  moved(offered.push, 0);
  EXPECT_EQ(core_->num_pushes(), 0u);
  EXPECT_EQ(core_->pool().num_pinned(), 2u);
}

TEST_F(Sending, MovesFromThePoolWhatWasThereBeforeTheAnswer) {
  const OfferPush offered = offer("r", 32);
  prefill("r", 32);  // the saves belong to the push, because the decode node may still want the chunks
  moved(offered.push, 0, false);
  moved(offered.push, 1, false);
  answer(offered, {kDeclined, kPresent});
  EXPECT_THAT(settled(), IsEmpty()) << "nothing was granted";
  EXPECT_EQ(core_->num_pushes(), 0u);
  const OfferPush again = offer("s", 33);
  answer(again, {kGranted, kPresent, kGranted});
  const auto started = take<StartPush>();
  ASSERT_THAT(started, SizeIs(1));
  EXPECT_EQ(started[0].index, 0u);
  EXPECT_THAT(started[0].checksums, ElementsAre(1u));
  EXPECT_EQ(core_->pool().num_pinned(), 1u);
}

TEST_F(Sending, PushesAPulledChunkWhenItIsInItsSlot) {
  const StartPull pulling = start_pull();
  core_->pull_done(pulling.pull, 0, {true}, now_, {}, {}, {true});
  const OfferPush offered = offer("r", 32);
  answer(offered, {kGranted, kDeclined});
  EXPECT_THAT(take<StartPush>(), IsEmpty()) << "only its frame has it";
  core_->slot_written(pulling.items[0].local, 0, true, now_);
  EXPECT_THAT(take<StartPush>(), SizeIs(1));
}

TEST_F(Sending, PushesAChunkThatIsPulledAfterTheAnswerWhenItIsInItsSlot) {
  const StartPull pulling = start_pull();
  const OfferPush offered = offer("r", 32);
  answer(offered, {kGranted, kDeclined});
  core_->pull_done(pulling.pull, 0, {true}, now_, {}, {}, {true});
  EXPECT_THAT(take<StartPush>(), IsEmpty()) << "only its frame has it";
  core_->slot_written(pulling.items[0].local, 0, true, now_);
  EXPECT_THAT(take<StartPush>(), SizeIs(1));
}

TEST_F(Sending, TellsAFailedSaveAsFailedWhenNobodyReadsItAnyMore) {
  const OfferPush offered = offer("r", 16);
  answer(offered, {kGranted});
  const StepPlan plan = prefill("r", 16, false);
  WorkerReport report = well_done(plan);
  report.saves[0].ok = false;
  core_->worker_report(report, now_);
  EXPECT_THAT(settled(), IsEmpty());
  moved(offered.push, 0, false);
  const auto told = settled();
  ASSERT_THAT(told, SizeIs(1));
  EXPECT_FALSE(told[0].ok);
  EXPECT_EQ(core_->pool().num_writing() + core_->pool().num_pinned(), 0u);
}

TEST_F(Sending, TellsNothingOfAResetCacheAsGood) {
  const OfferPush offered = offer("r", 16);
  answer(offered, {kGranted});
  prefill("r", 16);
  core_->reset_cache();
  moved(offered.push, 0);
  const auto told = settled();
  ASSERT_THAT(told, SizeIs(1));
  EXPECT_FALSE(told[0].ok);
}

TEST_F(Sending, AnAbortedRequestGivesBackWhatItNeverComputed) {
  const OfferPush offered = offer("r", 48);
  answer(offered, {kGranted, kGranted, kGranted});
  core_->finished(RequestId{"r"}, 0, {}, true, now_);
  const auto told = settled();
  ASSERT_THAT(told, SizeIs(3));
  EXPECT_FALSE(told[0].ok || told[1].ok || told[2].ok);
  EXPECT_EQ(core_->num_pushes(), 0u);
}

TEST_F(Sending, WhatIsNeverAnsweredEndsAtItsDeadline) {
  const OfferPush offered = offer("r", 16);
  prefill("r", 16);
  EXPECT_EQ(core_->pool().num_pinned(), 1u);
  core_->tick(now_ += 61 * kSecond);
  EXPECT_THAT(take<DropPush>(), SizeIs(1));
  EXPECT_EQ(core_->num_pushes(), 1u) << "its worker has not said that it is over";
  moved(offered.push, 0, false);
  EXPECT_EQ(core_->num_pushes(), 0u);
  EXPECT_EQ(core_->pool().num_pinned(), 0u);
}

TEST_F(Sending, AWorkerThatNeverAnswersHoldsNothingForEver) {
  offer("r", 16);
  prefill("r", 16);
  core_->finished(RequestId{"r"}, 16, {blocks(1, 1)}, true, now_);
  core_->tick(now_ += 61 * kSecond);
  core_->tick(now_ += 31 * kSecond);
  EXPECT_EQ(core_->num_pushes(), 0u);
  EXPECT_EQ(core_->pool().num_pinned(), 0u);
}

TEST_F(Sending, WhatAWorkerNeverReportsIsSettledOnceAsFailed) {
  const OfferPush offered = offer("r", 32);
  answer(offered, {kGranted, kPresent});
  prefill("r", 32);
  core_->finished(RequestId{"r"}, 32, {blocks(1, 2)}, true, now_);
  core_->tick(now_ += 61 * kSecond);
  EXPECT_THAT(settled(), IsEmpty()) << "the worker may still write";
  EXPECT_EQ(core_->pool().num_pinned(), 1u);
  core_->tick(now_ += 31 * kSecond);
  const auto told = settled();
  ASSERT_THAT(told, SizeIs(1));
  EXPECT_EQ(told[0].index, 0u);
  EXPECT_FALSE(told[0].ok);
  EXPECT_EQ(core_->num_pushes(), 0u);
  EXPECT_EQ(core_->pool().num_pinned(), 0u);
  moved(offered.push, 0);  // this outcome comes too late
  core_->tick(now_ += 31 * kSecond);
  EXPECT_THAT(settled(), IsEmpty());
  EXPECT_EQ(core_->counters().push_failures, 1u);
}

TEST_F(Sending, AnOutcomeTwiceIsABrokenPromise) {
  const OfferPush offered = offer("r", 16);
  answer(offered, {kGranted});
  prefill("r", 16, false);
  moved(offered.push, 0);
  EXPECT_BREAKS(moved(offered.push, 0), "exactly-once");
}

TEST_F(Sending, UnknownPeersAndDoubledAnswersAreIgnored) {
  const OfferPush offered = offer("r", 16);
  EXPECT_FALSE(core_->awaits_push_answer(offered.push, "tcp://somebody:1"));
  EXPECT_TRUE(core_->awaits_push_answer(offered.push, "tcp://decode:1"));
  core_->push_answered(offered.push, "tcp://somebody:1", {5, {}, {kGranted}}, now_);
  core_->push_answered(offered.push + 9, "tcp://decode:1", {5, {}, {kGranted}}, now_);
  core_->push_answered(offered.push, "tcp://somebody:1", {0, "a text for the log", {}}, now_);
  EXPECT_THAT(take<LogLine>(), IsEmpty());
  answer(offered, {});  // the answer has no verdict for the chunk
  EXPECT_FALSE(core_->awaits_push_answer(offered.push, "tcp://decode:1"));
  answer(offered, {kGranted});
  EXPECT_EQ(core_->num_pushes(), 0u);
  prefill("r", 16);
  EXPECT_THAT(take<StartPush>(), IsEmpty());
}

/// The core of the decode node. The test plays the prefill node and the workers.
class Granting : public CoreBench {
 protected:
  Granting() : CoreBench(sizes(16, 16, 8)) {}
  PushOffer prompt(std::uint32_t num_tokens, std::uint32_t num_ranks = 1) {
    TokenChain chain(root_key("model", ""), 16, {});
    chain.append(std::span(tokens_).first(num_tokens));
    PushOffer made{"model", num_ranks, {}, {}};
    for (std::uint32_t i = 0; i < chain.num_full_chunks(); ++i) made.chunks.push_back({chain.key(i), 16, {}});
    if (const std::uint32_t rest = num_tokens % 16; rest > 0)
      made.chunks.push_back({chain.tail_key(chain.num_full_chunks(), rest), rest, {}});
    return made;
  }
  /// Adds a request of this length. Node p has computed `num_computed` tokens of its prompt.
  void hand_over(std::size_t num_tokens, std::uint32_t num_computed) {
    NewRequest added = request("r", num_tokens);
    added.source = HandoffSource{"tcp://p:1", "r", num_computed};
    core_->add_request(added, now_);
  }
  /// Settles a push of two chunks as if none was written.
  void settle_as_failed(const PushReply& reply) {
    core_->push_settled({reply.reservation, {{0, false, 0, {}}, {1, false, 0, {}}}}, now_);
  }
  std::vector<RevokedChunk> reclaim_all(std::uint32_t rank = 0) {
    std::vector<RevokedChunk> all;
    for (const RevokeSlots& one : take<RevokeSlots>()) {
      Revocation answer = one;
      answer.rank = rank;
      all.insert(all.end(), answer.chunks.begin(), answer.chunks.end());
      core_->push_revoked(answer, now_);
    }
    return all;
  }
};

TEST_F(Granting, ASettledChunkIsFoundOnceItsSlotIsTakenBack) {
  const PushReply reply = core_->push_offered("p", prompt(32), now_);
  EXPECT_THAT(reply.verdicts, ElementsAre(kGranted, kGranted));
  EXPECT_THAT(take<GrantSlots>(), SizeIs(1));
  core_->push_settled({reply.reservation, {{0, true, 0, {9}}, {1, true, 0, {9}}}}, now_);
  EXPECT_EQ(core_->pool().num_ready(), 0u) << "somebody may be writing still";
  reclaim_all();
  EXPECT_EQ(core_->pool().num_ready(), 2u);
  EXPECT_THAT(take<PublishChunks>(), SizeIs(2));
  EXPECT_EQ(core_->num_reservations(), 0u);
  add("r", 40);
  EXPECT_EQ(lookup("r").num_external, 32u);
}

TEST_F(Granting, APushedChunkLacksOfTheWindowWhatItsSenderLacks) {
  const PushReply reply = core_->push_offered("p", prompt(16), now_);
  core_->push_settled({reply.reservation, {{0, true, 12, {9}}}}, now_);
  reclaim_all();
  const std::vector<ChunkMeta> chunks = core_->snapshot();
  ASSERT_THAT(chunks, SizeIs(1));
  EXPECT_EQ(chunks[0].window_from, 12u);
}

TEST_F(Granting, GrantsHalfOfThePoolAndNothingTwice) {
  const PushReply reply = core_->push_offered("p", prompt(96), now_);
  EXPECT_THAT(reply.verdicts, ElementsAre(kGranted, kGranted, kGranted, kGranted, kDeclined, kDeclined));
  const PushReply again = core_->push_offered("q", prompt(32), now_);
  EXPECT_THAT(again.verdicts, ElementsAre(kPresent, kPresent));
  EXPECT_EQ(again.reservation, 0u);
  EXPECT_EQ(core_->num_reserved_chunks(), 4u);
}

TEST_F(Granting, AFailedChunkLeavesItsSlotFree) {
  const PushReply reply = core_->push_offered("p", prompt(16), now_);
  core_->push_settled({reply.reservation, {{0, false, 0, {}}}}, now_);
  core_->push_settled({reply.reservation, {{0, true, 0, {9}}}}, now_);  // this settlement comes too late
  const auto back = reclaim_all();
  ASSERT_THAT(back, SizeIs(1));
  EXPECT_FALSE(back[0].ok);
  EXPECT_EQ(core_->pool().num_ready() + core_->pool().num_writing(), 0u);
}

TEST_F(Granting, NonsenseIsIgnored) {
  PushOffer offer = prompt(32);
  offer.chunks[0].num_tokens = 17;
  offer.chunks[1].num_tokens = 0;
  EXPECT_THAT(core_->push_offered("p", offer, now_).verdicts, ElementsAre(kDeclined, kDeclined));
  EXPECT_THAT(core_->push_offered("p", prompt(32, 2), now_).verdicts, ElementsAre(kDeclined, kDeclined));
  const PushReply reply = core_->push_offered("p", prompt(16), now_);
  core_->push_settled({reply.reservation + 1, {{0, true, 0, {9}}}}, now_);
  core_->push_settled({reply.reservation, {{7, true, 0, {9}}}}, now_);
  EXPECT_THAT(take<RevokeSlots>(), IsEmpty());
  core_->push_settled({reply.reservation, {{0, true, 0, {9, 9}}}}, now_);  // these checksums are for another shape
  EXPECT_FALSE(reclaim_all().at(0).ok);
}

TEST_F(Granting, NobodySettlesAPushThatAnotherOffered) {
  const std::uint64_t own = core_->push_offered("liar", prompt(16), now_).reservation;
  const std::uint64_t other = core_->push_offered("p", prompt(32), now_).reservation;
  for (std::uint64_t step = 1; step <= 1000; ++step)
    for (const std::uint64_t guess : {step, own + step, own - step})
      core_->push_settled({guess, {{1, true, 0, {7}}}}, now_);
  EXPECT_THAT(take<RevokeSlots>(), IsEmpty());
  core_->push_settled({own, {{0, true, 0, {9}}}}, now_);
  reclaim_all();
  core_->push_settled({own, {{0, true, 0, {7}}, {1, true, 0, {7}}}}, now_);  // again
  EXPECT_EQ(core_->counters().unknown_releases, 3001u);
  EXPECT_EQ(core_->pool().num_ready(), 1u);
  core_->push_settled({other, {{1, true, 0, {9}}}}, now_);
  reclaim_all();
  EXPECT_EQ(core_->pool().num_ready(), 2u);
}

TEST_F(Granting, AFullChunksKeyWithAnotherLengthIsDroppedWhenItsTokensAreKnown) {
  PushOffer offer = prompt(32);
  offer.chunks[1].num_tokens = 1;
  const PushReply reply = core_->push_offered("p", offer, now_);
  EXPECT_THAT(reply.verdicts, ElementsAre(kGranted, kGranted));
  core_->push_settled({reply.reservation, {{0, true, 0, {9}}, {1, true, 0, {9}}}}, now_);
  reclaim_all();
  EXPECT_EQ(core_->pool().num_ready(), 2u);
  add("r", 40);
  EXPECT_EQ(lookup("r").num_external, 16u);
  EXPECT_EQ(core_->counters().mislabeled_chunks, 1u);
  EXPECT_EQ(core_->pool().num_ready(), 1u);
  core_->allocated(RequestId{"r"}, 16, {blocks(1, 3)}, now_);
  const StepPlan plan = build({{{RequestId{"r"}, 16, 24, BlockTable{blocks(1, 3)}}}, {}});
  EXPECT_THAT(plan.saves_after, SizeIs(1)) << "the chunk itself is saved in its place";
}

TEST_F(Granting, AWrongLengthThatIsStillBeingWrittenIsNotWaitedForAndNeverReady) {
  PushOffer offer = prompt(16);
  offer.chunks[0].num_tokens = 15;
  const PushReply reply = core_->push_offered("p", offer, now_);
  add("r", 40);
  EXPECT_FALSE(lookup("r").pending);
  core_->allocated(RequestId{"r"}, 0, {blocks(1, 3)}, now_);
  build({{{RequestId{"r"}, 0, 40, BlockTable{blocks(1, 3)}}}, {}});
  core_->push_settled({reply.reservation, {{0, true, 0, {9}}}}, now_);
  reclaim_all();
  EXPECT_EQ(core_->counters().mislabeled_chunks, 1u);
  EXPECT_EQ(core_->pool().num_ready(), 1u) << "the second chunk, which the request saved";
}

TEST_F(Granting, ATailsKeyWithAnotherLengthIsDropped) {
  PushOffer offer = prompt(24);
  offer.chunks[1].num_tokens = 7;
  const PushReply reply = core_->push_offered("p", offer, now_);
  core_->push_settled({reply.reservation, {{0, true, 0, {9}}, {1, true, 0, {9}}}}, now_);
  reclaim_all();
  hand_over(25, 24);
  lookup("r");
  EXPECT_EQ(core_->counters().mislabeled_chunks, 1u);
  EXPECT_EQ(core_->pool().num_ready(), 1u);
}

TEST_F(Granting, AnotherModelIsRefused) {
  PushOffer offer = prompt(16);
  offer.fingerprint = "another";
  EXPECT_THAT(core_->push_offered("p", offer, now_).refused, HasSubstr("'another'"));
  EXPECT_EQ(core_->num_reservations(), 0u);
}

TEST_F(Granting, AReservationEndsByItself) {
  core_->push_offered("p", prompt(16), now_);
  core_->tick(now_ += 61 * kSecond);
  EXPECT_FALSE(reclaim_all().at(0).ok);
  EXPECT_EQ(core_->num_reservations(), 0u);
}

TEST_F(Granting, AReservationEndsSoonAfterItsRequestHasArrived) {
  core_->push_offered("p", prompt(20), now_);
  hand_over(20, 20);
  EXPECT_TRUE(lookup("r").pending) << "it may come yet";
  core_->tick(now_ += 1100 * kMillisecond);
  reclaim_all();
  EXPECT_EQ(core_->num_reservations(), 0u);
}

TEST_F(Granting, AReservationEndsSoonIfItsRequestHasArrivedBeforeIt) {
  const PushReply failed = core_->push_offered("p", prompt(20), now_);
  hand_over(20, 20);
  EXPECT_TRUE(lookup("r").pending) << "it is being pushed";
  settle_as_failed(failed);
  reclaim_all();
  core_->push_offered("p", prompt(20), now_);
  core_->tick(now_ += 1100 * kMillisecond);
  reclaim_all();
  EXPECT_EQ(core_->num_reservations(), 0u);
}

TEST_F(Granting, AfterAFailedPushItsSourceIsAskedThoughTheEngineHadNoRoomBefore) {
  const PushReply reply = core_->push_offered("p", prompt(20), now_);
  hand_over(20, 20);
  EXPECT_FALSE(lookup("r", 19).pending) << "the engine's own cache had the prompt";
  build();  // the engine has no room for the request, and looks it up again later
  settle_as_failed(reply);
  reclaim_all();
  take<RequestLease>();
  core_->tick(now_ += kMillisecond);
  EXPECT_THAT(take<RequestLease>(), SizeIs(1)) << "by now the cache may have lost the prompt";
}

TEST_F(Granting, AfterAFailedPushItsSourceIsAskedThoughTheEngineLooksNothingUp) {
  const PushReply reply = core_->push_offered("p", prompt(20), now_);
  hand_over(20, 20);
  EXPECT_TRUE(lookup("r").pending) << "it is being pushed";
  settle_as_failed(reply);
  for (const RevokeSlots& revoked : take<RevokeSlots>()) {
    core_->tick(now_ += kMillisecond);
    EXPECT_THAT(take<RequestLease>(), IsEmpty()) << "its slots are not free yet";
    core_->push_revoked(revoked, now_);
  }
  core_->tick(now_ += kMillisecond);
  const std::vector<RequestLease> asked = take<RequestLease>();
  ASSERT_THAT(asked, SizeIs(1)) << "the engine has no room, and may not ask again before the wait is over";
  EXPECT_EQ(asked[0].endpoint, "tcp://p:1");
  EXPECT_THAT(asked[0].request.keys, SizeIs(2));
}

TEST_F(Granting, AWriterThatDoesNotLeaveItsSlotKeepsNobodyWaiting) {
  const PushReply reply = core_->push_offered("stopped", prompt(96), now_);
  EXPECT_EQ(core_->num_reserved_chunks(), 4u);
  core_->tick(now_ += 60 * kSecond);  // the deadline passes; the workers are told to revoke the slots, but can't
  add("r", 24);
  EXPECT_TRUE(lookup("r").pending) << "they may come back yet";
  core_->tick(now_ += 1100 * kMillisecond);
  EXPECT_FALSE(lookup("r").pending);
  EXPECT_EQ(core_->num_reserved_chunks(), 0u) << "others may push";
  EXPECT_EQ(core_->pool().num_writing(), 4u) << "but into other slots";
  EXPECT_EQ(core_->counters().writes_abandoned, 4u);
  const std::vector<RevokeSlots> late = take<RevokeSlots>();
  const PushReply again = core_->push_offered("p", prompt(16), now_);
  EXPECT_THAT(again.verdicts, ElementsAre(kGranted));
  core_->push_settled({again.reservation, {{0, true, 0, {9}}}}, now_);
  reclaim_all();
  ASSERT_THAT(late, SizeIs(1));
  Revocation answer = late[0];
  answer.rank = 0;
  core_->push_revoked(answer, now_);  // at last the writer leaves the slots, and the grants are revoked
  EXPECT_EQ(core_->num_reservations(), 0u);
  EXPECT_EQ(core_->pool().num_writing(), 0u);
  EXPECT_EQ(core_->pool().num_ready(), 1u);
  add("s", 24);
  EXPECT_EQ(lookup("s").num_external, 16u);
}

TEST_F(Granting, WritersThatDoNotLeaveTheirSlotsLeaveAQuarterOfThePoolToOthers) {
  const PushOffer offer = prompt(96);
  for (int round = 0; round < 3; ++round) {
    core_->push_offered("stopped", offer, now_);
    for (int second = 0; second < 62; ++second) core_->tick(now_ += kSecond);
    EXPECT_EQ(core_->num_reserved_chunks(), 0u);
  }
  EXPECT_EQ(core_->pool().num_writing(), 6u);
  EXPECT_EQ(core_->push_offered("p", prompt(16), now_).reservation, 0u);
  reclaim_all();
  EXPECT_EQ(core_->pool().num_writing(), 0u);
  EXPECT_THAT(core_->push_offered("p", prompt(64), now_).verdicts, ElementsAre(kGranted, kGranted, kGranted, kGranted));
}

TEST_F(Granting, AResetCacheInvalidatesEarlierPushes) {
  const PushReply reply = core_->push_offered("p", prompt(16), now_);
  core_->reset_cache();
  core_->push_settled({reply.reservation, {{0, true, 0, {9}}}}, now_);
  reclaim_all();
  EXPECT_EQ(core_->pool().num_ready(), 0u);
}

TEST_F(Granting, WhatWorkersCantGrantIsFreeAtOnce) {
  const PushReply reply = core_->push_offered("p", prompt(32), now_);
  const std::vector<std::uint32_t> missing = {1};
  core_->push_grant_failed(reply.reservation, missing);
  EXPECT_EQ(reclaim_all().at(0).index, 1u);
  EXPECT_EQ(core_->num_reserved_chunks(), 1u);
}

TEST_F(Granting, ASlotTakenBackTwiceIsABrokenPromise) {
  const PushReply reply = core_->push_offered("p", prompt(32), now_);
  core_->push_settled({reply.reservation, {{0, true, 0, {9}}}}, now_);
  const auto ordered = take<RevokeSlots>();
  core_->push_revoked(ordered.at(0), now_);
  EXPECT_BREAKS(core_->push_revoked(ordered.at(0), now_), "exactly-once");
}

}  // namespace
}  // namespace kvferry::sim
