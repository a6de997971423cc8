// Tests pushes between nodes that both have frames of GPU memory: the prefill node announces chunks, and the decode
// node pulls them.
#include "push_bench.h"

namespace kvferry::sim {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::Field;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr auto kNotWanted = static_cast<std::uint8_t>(PushVerdict::kDeclined);
constexpr auto kIsHere = static_cast<std::uint8_t>(PushVerdict::kPresent);
constexpr auto kPulled = static_cast<std::uint8_t>(PushVerdict::kPulled);

class Announcing : public PushBench {
 protected:
  /// Plays the decode node, which leases announced chunks of the offer.
  LeaseReply lease(const OfferPush& offered, std::initializer_list<std::uint32_t> chunks, bool is_sure = false) {
    LeaseRequest wanted{"model", {}, {}};
    for (const std::uint32_t index : chunks) wanted.keys.push_back(offered.offer.chunks.at(index).key);
    wanted.push = offered.push;
    wanted.is_sure_of_frames = is_sure;
    return core_->lease_requested("decode", wanted, now_);
  }
};

TEST_F(Announcing, TellsEachChunkOnceItIsCompleteAndMovesNone) {
  const OfferPush offered = offer("r", 32);
  answer(offered, {kPulled, kPulled});
  const StepPlan plan = prefill("r", 32, false);
  ASSERT_THAT(plan.saves_after, SizeIs(2));
  EXPECT_EQ(plan.saves_after[0].items[0].push, 0u) << "the workers have nothing to move";
  EXPECT_THAT(settled(), IsEmpty()) << "nothing is saved yet";
  core_->worker_report(well_done(plan), now_);
  const std::vector<Action> actions = core_->take_actions();
  std::vector<std::uint32_t> told;
  for (const Action& action : actions) {
    EXPECT_FALSE(std::holds_alternative<StartPush>(action));
    if (const auto* one = std::get_if<SettlePush>(&action)) {
      EXPECT_EQ(one->endpoint, "tcp://decode:1");
      EXPECT_EQ(one->settlement.reservation, 77u);
      EXPECT_TRUE(one->settlement.chunks.at(0).ok);
      told.push_back(one->settlement.chunks.at(0).index);
    }
  }
  EXPECT_THAT(told, ElementsAre(0u, 1u));
  EXPECT_EQ(core_->counters().announced_chunks, 2u);
  EXPECT_EQ(core_->counters().pushed_chunks, 0u);
}

TEST_F(Announcing, EndsWithTheLeasesOnItsChunksAndThenNeedsNoHandOff) {
  const OfferPush offered = offer("r", 32);
  answer(offered, {kPulled, kPulled});
  core_->worker_report(well_done(prefill("r", 32, false)), now_);
  const LeaseReply first = lease(offered, {0});
  core_->finished(RequestId{"r"}, 32, {blocks(1, 2)}, false, now_);
  EXPECT_EQ(core_->pool().num_pinned(), 2u) << "for the decode node, which has not pulled all";
  core_->lease_released(first.lease);
  EXPECT_EQ(core_->num_pushes(), 1u);
  const LeaseReply second = lease(offered, {1});
  EXPECT_EQ(core_->pool().num_pinned(), 2u);
  core_->lease_released(second.lease);
  EXPECT_EQ(core_->num_pushes(), 0u);
  const LifeEvent ended = core_->recorder().transfers_after(0, now_).at(0).events.at(0);
  EXPECT_EQ(ended.what(), LifeKind::kPushed);
  EXPECT_EQ(ended.chunks, 2u);
  EXPECT_EQ(ended.bytes, 0u) << "the decode node counts them";
  EXPECT_EQ(ended.note.view(), "announced");
  EXPECT_EQ(core_->pool().num_pinned(), 0u);
}

TEST_F(Announcing, IsNotEndedByALeaseOfSomebodyElse) {
  const OfferPush offered = offer("r", 16);
  answer(offered, {kPulled});
  core_->worker_report(well_done(prefill("r", 16, false)), now_);
  LeaseRequest other{"model", {offered.offer.chunks[0].key}, {}};
  for (const std::uint64_t push : {std::uint64_t{0}, offered.push + 1}) {
    other.push = push;
    core_->lease_released(core_->lease_requested("x", other, now_).lease);
  }
  EXPECT_EQ(core_->num_pushes(), 1u);
  core_->lease_released(lease(offered, {0}).lease);
  EXPECT_EQ(core_->num_pushes(), 0u);
}

TEST_F(Announcing, TellsChunksThatWereSavedBeforeTheAnswer) {
  const OfferPush offered = offer("r", 32);
  const StepPlan plan = prefill("r", 32, false);
  EXPECT_EQ(plan.saves_after[0].items[0].push, offered.push) << "the decode node may still grant slots";
  core_->worker_report(well_done(plan), now_);
  answer(offered, {kPulled, kPulled});
  EXPECT_THAT(settled(), IsEmpty()) << "the workers have not said that they read no slot";
  for (const std::uint32_t index : {0, 1}) core_->chunk_push_ended({offered.push, 0, index, false, "no grant"}, now_);
  EXPECT_THAT(settled(), ElementsAre(Field(&SettledChunk::ok, true), Field(&SettledChunk::ok, true)));
  EXPECT_EQ(core_->pool().num_pinned(), 0u);
  const OfferPush again = offer("s", 33);
  answer(again, {kPulled, kIsHere, kNotWanted});
  EXPECT_THAT(settled(), ElementsAre(AllOf(Field(&SettledChunk::index, 0u), Field(&SettledChunk::ok, true))));
}

TEST_F(Announcing, TellsAFailedSaveAsFailed) {
  const OfferPush offered = offer("r", 32);
  const StepPlan plan = prefill("r", 32, false);
  answer(offered, {kPulled, kPulled});
  WorkerReport report = well_done(plan);
  report.saves[1].ok = false;
  core_->worker_report(report, now_);
  for (const std::uint32_t index : {0, 1}) core_->chunk_push_ended({offered.push, 0, index, false, "no grant"}, now_);
  const auto told = settled();
  ASSERT_THAT(told, SizeIs(2));
  EXPECT_TRUE(told[0].ok);
  EXPECT_FALSE(told[1].ok);
}

TEST_F(Announcing, TellsAChunkThatIsInItsFrameAndLeasesItToWhoReadsFrames) {
  const OfferPush offered = offer("r", 32);
  answer(offered, {kPulled, kPulled});
  const StepPlan plan = prefill("r", 32, false);
  WorkerReport report = well_done(plan);
  for (SaveDone& save : report.saves) save.is_in_frame = true;
  core_->worker_report(report, now_);
  std::vector<Action> actions = core_->take_actions();
  EXPECT_EQ(std::ranges::count_if(actions, [](const Action& one) { return std::holds_alternative<SettlePush>(one); }),
            2);
  for (const Action& action : actions)
    EXPECT_FALSE(std::holds_alternative<PublishChunks>(action)) << "a reader without frames could not read it";
  EXPECT_THAT(lease(offered, {0, 1}).chunks, IsEmpty()) << "the reader may have no path to the frames";
  const LeaseReply reply = lease(offered, {0, 1}, true);
  EXPECT_THAT(reply.chunks,
              ElementsAre(Field(&LeasedChunk::lacks_slots, true), Field(&LeasedChunk::lacks_slots, true)));
  core_->lease_released(reply.lease);
  EXPECT_EQ(core_->num_pushes(), 0u);
  core_->take_actions();
  report.saves[0].is_in_frame = report.saves[1].is_in_frame = report.saves[1].ok = false;
  core_->worker_report(report, now_);
  actions = core_->take_actions();
  ASSERT_THAT(actions, SizeIs(1)) << "the second chunk, which nobody was told of, is dropped";
  EXPECT_THAT(std::get<PublishChunks>(actions[0]).chunks, SizeIs(1));
  EXPECT_EQ(core_->counters().saved_chunks, 2u);
  EXPECT_EQ(core_->counters().slot_copies_failed, 1u);
  const LeaseReply late = lease(offered, {0, 1}, true);
  ASSERT_THAT(late.chunks, ElementsAre(Field(&LeasedChunk::index, 0u)));
  EXPECT_FALSE(late.chunks[0].lacks_slots);
  EXPECT_BREAKS(core_->worker_report(report, now_), "exactly-once");
}

TEST_F(Announcing, TellsAChunkOnceItIsInTheFrameOrSlotOfEveryRank) {
  CoreConfig config = sizes(16, 16, 8);
  config.num_ranks = 2;
  core_.emplace(config);
  const OfferPush offered = offer("r", 16);
  answer(offered, {kPulled});
  const StepPlan plan = prefill("r", 16, false);
  WorkerReport first = well_done(plan), second = well_done(plan, 1);
  first.saves[0].is_in_frame = true;
  core_->worker_report(first, now_);
  EXPECT_THAT(settled(), IsEmpty());
  first.saves[0].is_in_frame = false;
  core_->worker_report(first, now_);
  second.saves[0].is_in_frame = true;
  core_->worker_report(second, now_);
  EXPECT_THAT(settled(), SizeIs(1));
  EXPECT_THAT(lease(offered, {0}).chunks, IsEmpty());
  second.saves[0].is_in_frame = false;
  core_->worker_report(second, now_);
  EXPECT_THAT(take<PublishChunks>(), SizeIs(1));
  EXPECT_THAT(settled(), IsEmpty()) << "it was told before";
}

TEST_F(Announcing, TellsAChunkThatWasInItsFrameBeforeTheAnswer) {
  for (const std::uint8_t verdict : {kPulled, static_cast<std::uint8_t>(PushVerdict::kGranted)}) {
    core_.emplace(sizes(16, 16, 8));
    const OfferPush offered = offer("r", 16);
    WorkerReport report = well_done(prefill("r", 16, false));
    report.saves[0].is_in_frame = true;
    core_->worker_report(report, now_);
    answer(offered, {verdict});
    EXPECT_THAT(settled(), IsEmpty()) << "the workers have not said what they have pushed";
    core_->chunk_push_ended({offered.push, 0, 0, verdict != kPulled, "no grant"}, now_);
    EXPECT_THAT(settled(), ElementsAre(Field(&SettledChunk::ok, true)));
    report.saves[0].is_in_frame = false;
    core_->worker_report(report, now_);
    EXPECT_THAT(settled(), IsEmpty());
  }
}

TEST_F(Announcing, KeepsTheSlotOfAChunkInItsFrameThoughTheCacheIsReset) {
  core_.emplace(sizes(16, 16, 1));
  add("r", 16);
  WorkerReport report = well_done(prefill("r", 16, false));
  report.saves.at(0).is_in_frame = true;
  core_->worker_report(report, now_);
  core_->reset_cache();
  EXPECT_THAT(take<AnnounceEvictions>(), IsEmpty()) << "nobody was told of it";
  EXPECT_EQ(core_->pool().slot(0).state, ChunkPool::State::kRetired);
  report.saves[0].is_in_frame = false;
  core_->worker_report(report, now_);
  EXPECT_EQ(core_->pool().slot(0).state, ChunkPool::State::kFree);
  EXPECT_THAT(take<PublishChunks>(), IsEmpty());
}

TEST_F(Announcing, EndsAtItsDeadlineIfNobodyPulls) {
  const OfferPush offered = offer("r", 32);
  answer(offered, {kPulled, kPulled});
  core_->worker_report(well_done(prefill("r", 32, false)), now_);
  core_->finished(RequestId{"r"}, 32, {blocks(1, 2)}, false, now_);
  core_->tick(now_ += 61 * kSecond);
  EXPECT_EQ(core_->num_pushes(), 0u);
  EXPECT_EQ(core_->pool().num_pinned(), 0u);
  core_->lease_released(lease(offered, {0}).lease);  // comes too late
}

/// The core of the decode node. The test plays the prefill node and the workers.
class Pulling : public PullBench {
 protected:
  void announce(std::uint64_t reservation, std::initializer_list<std::uint32_t> chunks, bool ok = true) {
    PushSettlement settlement{reservation, {}};
    for (const std::uint32_t index : chunks) settlement.chunks.push_back({index, ok, 0, {3}});
    core_->push_settled(settlement, now_);
  }
  /// Answers a lease request with all chunks.
  void answer(const RequestLease& asked, std::uint64_t lease, std::uint32_t num_tokens = 16) {
    LeaseReply reply{lease, {}, {}};
    for (std::uint32_t i = 0; i < asked.request.keys.size(); ++i)
      reply.chunks.push_back({i, {i, 1}, num_tokens, {3}, 0, {}, {i}, 5});
    core_->lease_answered(asked.fetch, asked.endpoint, reply, now_);
  }
  void pulled(const StartPull& pull, bool in_frames = false) {
    const std::size_t num = pull.items.size();
    core_->pull_done(pull.pull, 0, std::vector<bool>(num, true), now_, {}, {}, std::vector<bool>(num, in_frames));
  }
};

TEST_F(Pulling, LeasesAndPullsEachAnnouncedChunkAtOnce) {
  const PushReply reply = offered(prompt(40));
  EXPECT_THAT(reply.verdicts, ElementsAre(kPulled, kPulled, kPulled));
  EXPECT_NE(reply.reservation, 0u);
  EXPECT_EQ(core_->num_reservations(), 1u);
  EXPECT_EQ(core_->pool().num_writing(), 0u) << "no slot is reserved for what is not there yet";
  announce(reply.reservation, {0});
  const auto first = take<RequestLease>();
  ASSERT_THAT(first, SizeIs(1));
  EXPECT_EQ(first[0].endpoint, "tcp://p:1");
  EXPECT_THAT(first[0].request.keys, ElementsAre(prompt(40).chunks[0].key));
  EXPECT_EQ(first[0].request.push, 9u);
  announce(reply.reservation, {1});
  announce(reply.reservation, {2});
  EXPECT_THAT(take<RequestLease>(), IsEmpty()) << "the first request is under way";
  answer(first[0], 70);
  std::vector<StartPull> pulls;
  std::vector<RequestLease> asked;
  for (Action& action : core_->take_actions()) {
    if (auto* pull = std::get_if<StartPull>(&action)) pulls.push_back(*pull);
    if (auto* next = std::get_if<RequestLease>(&action)) asked.push_back(*next);
  }
  ASSERT_THAT(pulls, SizeIs(1));
  EXPECT_THAT(pulls[0].items.at(0).frames, ElementsAre(0u));
  ASSERT_THAT(asked, SizeIs(1)) << "what was announced meanwhile is asked for while the first chunk is pulled";
  EXPECT_THAT(asked[0].request.keys, SizeIs(2));
  pulled(pulls[0], true);
  EXPECT_EQ(core_->pool().num_ready(), 1u);
  EXPECT_EQ(core_->pool().slot(pulls[0].items[0].local.slot).meta.tenant, 5u);
  EXPECT_THAT(take<ReleaseLease>(), ElementsAre(Field(&ReleaseLease::lease, 70u)));
  core_->slot_written(pulls[0].items[0].local, 0, true, now_);
  EXPECT_THAT(take<PublishChunks>(), SizeIs(1));
  const std::vector<RequestLife> transfers = core_->recorder().transfers_after(0, now_);
  ASSERT_THAT(transfers, SizeIs(1));
  EXPECT_EQ(transfers[0].events.at(0).what(), LifeKind::kPulled);
  EXPECT_EQ(transfers[0].events[0].peer.view(), "tcp://p:1");
  EXPECT_EQ(transfers[0].events[0].chunks, 1u);
  EXPECT_THAT(core_->recorder().slowest(5, now_), IsEmpty()) << "a pull of no request is no request's life";
  EXPECT_EQ(core_->num_reservations(), 1u);
}

TEST_F(Pulling, IsSureOfFramesOnceTheyWereReachedAndUntilTheyWereMissed) {
  const PushReply reply = offered(prompt(64));
  const auto pulls = [&](std::uint32_t chunk, TransferEnd end) {
    announce(reply.reservation, {chunk});
    const RequestLease asked = take<RequestLease>().at(0);
    answer(asked, 70 + chunk);
    core_->pull_done(take<StartPull>().at(0).pull, 0, {true}, now_, {}, end);
    return asked.request.is_sure_of_frames;
  };
  TransferEnd reached, missed;
  reached.num_in_frames = missed.num_past_frames = 1;
  EXPECT_FALSE(pulls(0, reached));
  EXPECT_TRUE(pulls(1, {})) << "what is in no frame says nothing";
  EXPECT_TRUE(pulls(2, missed));
  EXPECT_FALSE(pulls(3, reached));
}

TEST_F(Pulling, AnnouncedChunksAreFoundByTheirRequest) {
  const PushReply reply = offered(prompt(32));
  announce(reply.reservation, {0, 1});
  answer(take<RequestLease>().at(0), 70);
  EXPECT_EQ(core_->num_reservations(), 0u);
  const auto pulls = take<StartPull>();
  NewRequest added = request("r", 33);
  added.source = HandoffSource{"tcp://p:1", "r", 33};
  core_->set_directory_up(false);
  core_->add_request(added, now_);
  EXPECT_TRUE(lookup("r").pending) << "they are on their way";
  pulled(pulls.at(0));
  core_->tick(now_ += kMillisecond);
  for (const RequestLease& rest : take<RequestLease>()) core_->lease_answered(rest.fetch, rest.endpoint, {}, now_);
  EXPECT_EQ(lookup("r").num_external, 32u);
}

TEST_F(Pulling, WhatIsAnnouncedAsFailedOrTwiceOrByAnotherNumberIsNotPulled) {
  const PushReply reply = offered(prompt(32));
  announce(reply.reservation, {0}, false);
  announce(reply.reservation, {0});
  announce(reply.reservation, {7});
  announce(reply.reservation + 1, {1});
  EXPECT_THAT(take<RequestLease>(), IsEmpty());
  EXPECT_EQ(core_->counters().unknown_releases, 1u);
  announce(reply.reservation, {1});
  EXPECT_THAT(take<RequestLease>(), SizeIs(1));
}

TEST_F(Pulling, WhatIsHereByNowIsNotPulledButItsLeaseIsGivenBack) {
  const PushReply reply = offered(prompt(16));
  core_->set_directory_up(false);
  cache(16);
  announce(reply.reservation, {0});
  answer(take<RequestLease>().at(0), 70);
  const auto actions = core_->take_actions();
  ASSERT_THAT(actions, SizeIs(1));
  EXPECT_EQ(std::get<ReleaseLease>(actions[0]).lease, 70u) << "so the prefill node knows that nothing is missing";
  EXPECT_EQ(core_->num_reservations(), 0u);
}

TEST_F(Pulling, TakesHalfOfThePoolAtMost) {
  const PushReply reply = offered(prompt(96));
  EXPECT_THAT(reply.verdicts, ElementsAre(kPulled, kPulled, kPulled, kPulled, kNotWanted, kNotWanted));
  PushOffer slots = prompt(96);
  slots.has_frames = false;
  EXPECT_EQ(core_->push_offered("q", slots, now_).reservation, 0u) << "both kinds of pushes share the half";
}

TEST_F(Pulling, WhoeverDoesNotNameItselfIsNotPulledFrom) {
  PushOffer offer = prompt(16);
  for (const std::string& from : {std::string("?"), std::string(600, 'x')}) {
    offer.from = from;
    offer.chunks[0].key.bytes[0] ^= 1;
    EXPECT_NE(core_->push_offered("p", offer, now_).verdicts.at(0), kPulled);
  }
}

TEST(AnnouncedPushesTest, NameNotMoreThanSoManyEndpointsAtATime) {
  AnnouncedPushes pushes;
  const auto of = [](std::size_t i) { return fmt::format("tcp://10.0.0.1:{}", i); };
  for (std::size_t i = 0; i < AnnouncedPushes::kEndpointsMax; ++i) {
    EXPECT_TRUE(pushes.has_room_for(of(i)));
    pushes.expect(i + 1, {of(i), "", 1, kSecond, {{0, {}}}});
  }
  EXPECT_FALSE(pushes.has_room_for("tcp://another:1"));
  EXPECT_TRUE(pushes.has_room_for(of(7)));
  pushes.erase_ended(kSecond);
  EXPECT_TRUE(pushes.has_room_for("tcp://another:1"));
}

TEST(FrameHoldersTest, AreNotMoreThanSoManyAtATime) {
  FrameHolders holders;
  for (std::size_t i = 0; i < 2 * FrameHolders::kMax; ++i) holders.reached(fmt::format("tcp://10.0.0.1:{}", i));
  EXPECT_LE(holders.size(), FrameHolders::kMax);
  EXPECT_TRUE(holders.contains(fmt::format("tcp://10.0.0.1:{}", 2 * FrameHolders::kMax - 1)));
}

TEST_F(Pulling, APushWhoseNodeIsGoneEnds) {
  const PushReply reply = offered(prompt(32));
  announce(reply.reservation, {0});
  const auto asked = take<RequestLease>();
  core_->tick(now_ += 1100 * kMillisecond);
  EXPECT_EQ(core_->counters().fetch_timeouts, 1u);
  announce(reply.reservation, {1});
  EXPECT_THAT(take<RequestLease>(), IsEmpty()) << "the node is left alone for a while";
  EXPECT_EQ(core_->num_reservations(), 0u);
  answer(asked.at(0), 70);
  EXPECT_THAT(take<ReleaseLease>(), SizeIs(1)) << "the answer comes too late";
  offered(prompt(48));
  EXPECT_EQ(core_->num_reservations(), 1u);
  core_->tick(now_ += 61 * kSecond);
  EXPECT_EQ(core_->num_reservations(), 0u);
}

TEST_F(Pulling, AnAnswerOfANodeThatWasNotAskedStartsNoPull) {
  const PushReply reply = offered(prompt(16));
  announce(reply.reservation, {0});
  RequestLease asked = take<RequestLease>().at(0);
  asked.endpoint = "tcp://liar:1";
  answer(asked, 70);
  EXPECT_THAT(take<StartPull>(), IsEmpty());
  EXPECT_EQ(core_->counters().unasked_answers, 1u);
}

TEST_F(Pulling, NothingIsPulledOfAPurgedNodeNorAfterAReset) {
  const PushReply purged = offered(prompt(16));
  core_->purge_ordered(1, "tcp://p:1", now_);
  announce(purged.reservation, {0});
  EXPECT_THAT(take<RequestLease>(), IsEmpty());
  EXPECT_NE(offered(prompt(16)).refused, "");
  core_->admit_ordered("tcp://p:1");
  const PushReply reset = offered(prompt(16));
  core_->reset_cache();
  announce(reset.reservation, {0});
  EXPECT_THAT(take<RequestLease>(), IsEmpty());
}

TEST_F(Pulling, DoesNotHoldUpReplications) {
  const PushReply reply = offered(prompt(16));
  announce(reply.reservation, {0});
  answer(take<RequestLease>().at(0), 70);
  EXPECT_THAT(take<StartPull>(), SizeIs(1));
  core_->replicate_ordered({"tcp://x:1", {{prompt(32).chunks[1].key, 16, false, {}}}, kSecond}, now_);
  EXPECT_THAT(take<RequestLease>(), ElementsAre(Field(&RequestLease::endpoint, "tcp://x:1")));
}

}  // namespace
}  // namespace kvferry::sim
