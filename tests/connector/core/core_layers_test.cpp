// Tests announced pushes whose chunks move by groups of layers while the prefill node still computes them.
#include "push_bench.h"

namespace kvferry::sim {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr auto kIsPulled = static_cast<std::uint8_t>(PushVerdict::kPulled);

CoreConfig with_layers(std::uint32_t num_ranks = 1) {
  CoreConfig config;
  config.fingerprint = "model";
  config.chunk_tokens = 16;
  config.groups = {{16}};
  config.num_slots = 8;
  config.num_ranks = num_ranks;
  config.pushes_layers = true;
  return config;
}

/// The prefill node. The test plays the decode node and the workers.
class LayersAnnounced : public PushBench {
 protected:
  LayersAnnounced() { core_.emplace(with_layers()); }
  void accept(const OfferPush& offered, bool takes_layers = true) {
    PushReply reply{77, {}, std::vector<std::uint8_t>(offered.offer.chunks.size(), kIsPulled)};
    reply.takes_layers = takes_layers;
    core_->push_answered(offered.push, "tcp://decode:1", reply, now_);
  }
  LeaseReply lease(const OfferPush& offered, std::vector<std::uint32_t> chunks, bool is_sure = true) {
    LeaseRequest wanted{"model", {}, {}};
    for (const std::uint32_t index : chunks) wanted.keys.push_back(offered.offer.chunks.at(index).key);
    wanted.push = offered.push;
    wanted.is_sure_of_frames = is_sure;
    return core_->lease_requested("decode", wanted, now_);
  }
  void end_transfers(const OfferPush& offered, std::initializer_list<std::uint32_t> chunks) {
    for (const std::uint32_t index : chunks) core_->chunk_push_ended({offered.push, 0, index, false, ""}, now_);
  }
};

TEST_F(LayersAnnounced, AsTheyAreInTheFramesOfAllRanks) {
  core_.emplace(with_layers(2));
  const OfferPush offered = offer("r", 32);
  accept(offered);
  const StepPlan plan = prefill("r", 32, false);
  EXPECT_EQ(plan.saves_after.at(0).items[0].push, offered.push) << "the workers tell of its layers";
  core_->layers_saved({offered.push, 0, {0, 1}, 1, 4});
  EXPECT_THAT(take<AnnounceLayers>(), IsEmpty()) << "the other rank has none";
  core_->layers_saved({offered.push, 1, {0, 1}, 2, 4});
  const auto told = take<AnnounceLayers>();
  ASSERT_THAT(told, SizeIs(1));
  EXPECT_EQ(told[0].endpoint, "tcp://decode:1");
  EXPECT_EQ(told[0].progress.reservation, 77u);
  EXPECT_THAT(told[0].progress.indices, ElementsAre(0u, 1u));
  EXPECT_EQ(told[0].progress.done, 1u);
  EXPECT_EQ(told[0].progress.of, 4u);
  core_->layers_saved({offered.push, 1, {0, 1}, 3, 4});
  EXPECT_THAT(take<AnnounceLayers>(), IsEmpty());
  core_->layers_saved({offered.push, 0, {0, 1}, 3, 4});
  EXPECT_EQ(take<AnnounceLayers>().at(0).progress.done, 3u);
  core_->layers_saved({offered.push, 0, {7}, 3, 4});
  core_->layers_saved({offered.push, 9, {0}, 3, 4});
  core_->layers_saved({offered.push + 5, 0, {0}, 3, 4});
  EXPECT_THAT(take<AnnounceLayers>(), IsEmpty());
}

TEST_F(LayersAnnounced, LetTheDecodeNodeLeaseAChunkWithoutChecksums) {
  const OfferPush offered = offer("r", 32);
  accept(offered);
  const StepPlan plan = prefill("r", 32, false);
  EXPECT_THAT(lease(offered, {0}).chunks, IsEmpty()) << "nothing was announced";
  core_->layers_saved({offered.push, 0, {0}, 1, 4});
  EXPECT_THAT(lease(offered, {0}, false).chunks, IsEmpty()) << "the reader may have no path to the frames";
  const LeaseReply reply = lease(offered, {0, 1});
  ASSERT_THAT(reply.chunks, SizeIs(1));
  EXPECT_TRUE(reply.chunks[0].is_growing && reply.chunks[0].lacks_slots);
  EXPECT_THAT(reply.chunks[0].checksums, IsEmpty());
  LeaseRequest other{"model", {offered.offer.chunks[0].key}, {}};
  other.is_sure_of_frames = true;
  EXPECT_THAT(core_->lease_requested("x", other, now_).chunks, IsEmpty()) << "nobody else learns when layers are there";
  core_->worker_report(well_done(plan), now_);
  EXPECT_THAT(settled(), IsEmpty());
  end_transfers(offered, {0, 1});
  const auto told = settled();
  ASSERT_THAT(told, SizeIs(2));
  EXPECT_TRUE(told[0].ok);
  EXPECT_THAT(told[0].checksums, SizeIs(1));
  core_->lease_released(reply.lease);
  EXPECT_EQ(core_->num_pushes(), 1u) << "the second chunk was not leased";
  core_->lease_released(lease(offered, {1}).lease);
  EXPECT_EQ(core_->num_pushes(), 0u);
  EXPECT_EQ(core_->pool().num_pinned(), 0u);
}

TEST_F(LayersAnnounced, AreSettledAsBadAfterAFailedSave) {
  const OfferPush offered = offer("r", 16);
  accept(offered);
  const StepPlan plan = prefill("r", 16, false);
  core_->layers_saved({offered.push, 0, {0}, 1, 4});
  const LeaseReply reply = lease(offered, {0});
  ASSERT_THAT(reply.chunks, SizeIs(1));
  WorkerReport report = well_done(plan);
  report.saves[0].ok = false;
  core_->worker_report(report, now_);
  end_transfers(offered, {0});
  const auto told = settled();
  ASSERT_THAT(told, SizeIs(1));
  EXPECT_FALSE(told[0].ok);
  EXPECT_THAT(lease(offered, {0}).chunks, IsEmpty());
  core_->lease_released(reply.lease);
  EXPECT_EQ(core_->pool().num_pinned(), 0u);
}

TEST_F(LayersAnnounced, ALeaseThatEndsEarlyDoesNotEndThePush) {
  const OfferPush offered = offer("r", 16);
  accept(offered);
  const StepPlan plan = prefill("r", 16, false);
  core_->layers_saved({offered.push, 0, {0}, 1, 4});
  core_->lease_released(lease(offered, {0}).lease);
  EXPECT_EQ(core_->num_pushes(), 1u);
  core_->worker_report(well_done(plan), now_);
  end_transfers(offered, {0});
  EXPECT_THAT(settled(), SizeIs(1));
  core_->lease_released(lease(offered, {0}).lease);
  EXPECT_EQ(core_->num_pushes(), 0u);
}

TEST_F(LayersAnnounced, AreToldToNoNodeThatDoesNotKnowThem) {
  const OfferPush offered = offer("r", 16);
  accept(offered, false);
  const StepPlan plan = prefill("r", 16, false);
  EXPECT_EQ(plan.saves_after.at(0).items[0].push, 0u);
  core_->layers_saved({offered.push, 0, {0}, 1, 4});
  EXPECT_THAT(take<AnnounceLayers>(), IsEmpty());
  core_->worker_report(well_done(plan), now_);
  EXPECT_THAT(settled(), SizeIs(1));
}

TEST_F(LayersAnnounced, OfAChunkThatWasPlannedBeforeTheAnswerToo) {
  const OfferPush offered = offer("r", 16);
  const StepPlan plan = prefill("r", 16, false);
  core_->layers_saved({offered.push, 0, {0}, 1, 4});
  EXPECT_THAT(take<AnnounceLayers>(), IsEmpty()) << "the decode node has not answered";
  accept(offered);
  core_->layers_saved({offered.push, 0, {0}, 2, 4});
  EXPECT_EQ(take<AnnounceLayers>().at(0).progress.done, 2u);
}

/// The decode node. The test plays the prefill node and the workers.
class LayersPulled : public PullBench {
 protected:
  LayersPulled() {
    const PushReply reply = offered(prompt(8, 1000));
    announce(reply.reservation, 0, true);
    answer(take<RequestLease>().at(0), false);
    TransferEnd end;
    end.num_in_frames = 1;
    core_->pull_done(take<StartPull>().at(0).pull, 0, {true}, now_, {}, end);  // the prefill node's frames are reached
    core_->take_actions();
  }
  void announce(std::uint64_t reservation, std::uint32_t chunk, bool ok) {
    core_->push_settled({reservation, {{chunk, ok, 0, {3}}}}, now_);
  }
  void progress(std::uint64_t reservation, std::vector<std::uint32_t> chunks, std::uint32_t done) {
    core_->push_progressed({reservation, std::move(chunks), done, 4}, now_);
  }
  void answer(const RequestLease& asked, bool is_growing, std::uint32_t num_tokens = 8) {
    LeaseReply reply{70, {}, {}};
    for (std::uint32_t i = 0; i < asked.request.keys.size(); ++i) {
      reply.chunks.push_back({i, {i, 1}, num_tokens, {3}, 0, {}, {i}, 5});
      reply.chunks.back().is_growing = reply.chunks.back().lacks_slots = is_growing;
      if (is_growing) reply.chunks.back().checksums.clear();
    }
    core_->lease_answered(asked.fetch, asked.endpoint, reply, now_);
  }
  /// Returns the pull of a prompt of two chunks whose first layers were announced.
  StartPull begin(std::uint64_t reservation) {
    progress(reservation, {0, 1}, 1);
    const auto asked = take<RequestLease>();
    EXPECT_THAT(asked, SizeIs(1));
    EXPECT_TRUE(asked.at(0).request.is_sure_of_frames);
    EXPECT_EQ(asked[0].request.push, 9u);
    EXPECT_THAT(asked[0].request.keys, SizeIs(2));
    answer(asked[0], true, 16);
    StartPull pull;
    std::vector<GrowPull> grown;
    for (const Action& action : core_->take_actions()) {
      if (const auto* begun = std::get_if<StartPull>(&action)) pull = *begun;
      if (const auto* one = std::get_if<GrowPull>(&action)) grown.push_back(*one);
    }
    EXPECT_THAT(pull.items, SizeIs(2));
    EXPECT_THAT(grown, SizeIs(2)) << "what was announced before may be pulled at once";
    for (const GrowPull& one : grown) EXPECT_TRUE(one.pull == pull.pull && one.done == 1 && !one.is_settled);
    return pull;
  }
};

TEST_F(LayersPulled, FromTheFirstAnnouncementOnAndAreReadyWithTheSettlementAlone) {
  const PushReply reply = offered(prompt(32));
  EXPECT_TRUE(reply.takes_layers);
  const StartPull pull = begin(reply.reservation);
  EXPECT_TRUE(pull.items[0].is_growing && pull.items[0].lacks_slots);
  progress(reply.reservation, {0, 1}, 3);
  auto grown = take<GrowPull>();
  ASSERT_THAT(grown, SizeIs(1)) << "one message for all chunks";
  EXPECT_THAT(grown[0].items, ElementsAre(0u, 1u));
  EXPECT_EQ(grown[0].done, 3u);
  announce(reply.reservation, 0, true);
  announce(reply.reservation, 1, false);
  grown = take<GrowPull>();
  ASSERT_THAT(grown, SizeIs(2));
  EXPECT_TRUE(grown[0].is_settled && grown[1].is_settled);
  EXPECT_THAT(grown[0].checksums, ElementsAre(3u));
  EXPECT_THAT(grown[1].checksums, IsEmpty()) << "it will not be completed";
  EXPECT_EQ(core_->num_reservations(), 0u);
  EXPECT_EQ(core_->pool().num_writing(), 2u);
  const std::uint32_t before = core_->pool().num_ready();
  core_->pull_done(pull.pull, 0, {true, false}, now_);
  EXPECT_EQ(core_->pool().num_ready(), before + 1);
  EXPECT_EQ(core_->pool().slot(pull.items[0].local.slot).checksums, std::vector<std::uint64_t>{3});
  EXPECT_THAT(take<ReleaseLease>(), SizeIs(1));
}

TEST_F(LayersPulled, NothingIsReadyBeforeItsChecksumIsKnown) {
  const PushReply reply = offered(prompt(32));
  const StartPull pull = begin(reply.reservation);
  const std::uint32_t before = core_->pool().num_ready();
  core_->pull_done(pull.pull, 0, {true, true}, now_);
  EXPECT_EQ(core_->pool().num_ready(), before) << "nobody has told what the bytes should be";
  core_->take_actions();
  announce(reply.reservation, 0, true);
  EXPECT_THAT(take<RequestLease>(), SizeIs(1)) << "the pull has ended, so the chunk is pulled once more";
}

TEST_F(LayersPulled, ASettlementThatComesBeforeTheLeaseIsKept) {
  const PushReply reply = offered(prompt(16));
  progress(reply.reservation, {0}, 1);
  const RequestLease asked = take<RequestLease>().at(0);
  announce(reply.reservation, 0, true);
  EXPECT_THAT(core_->take_actions(), IsEmpty());
  answer(asked, true, 16);
  const auto grown = take<GrowPull>();
  ASSERT_THAT(grown, SizeIs(2));
  EXPECT_TRUE(grown[1].is_settled);
}

TEST_F(LayersPulled, AChunkThatIsLeasedWholeNeedsNoSettlement) {
  const PushReply reply = offered(prompt(16));
  progress(reply.reservation, {0}, 1);
  answer(take<RequestLease>().at(0), false, 16);
  EXPECT_THAT(take<GrowPull>(), IsEmpty());
  EXPECT_EQ(core_->num_reservations(), 0u);
}

TEST_F(LayersPulled, AChunkThatIsNotLeasedIsPulledWhenItIsComplete) {
  const PushReply reply = offered(prompt(16));
  progress(reply.reservation, {0}, 1);
  const RequestLease asked = take<RequestLease>().at(0);
  core_->lease_answered(asked.fetch, asked.endpoint, {}, now_);
  progress(reply.reservation, {0}, 2);
  EXPECT_THAT(take<RequestLease>(), IsEmpty());
  announce(reply.reservation, 0, true);
  EXPECT_THAT(take<RequestLease>(), SizeIs(1));
}

TEST_F(LayersPulled, AHolderThatDoesNotAnswerIsLeftAlone) {
  const PushReply reply = offered(prompt(16));
  progress(reply.reservation, {0}, 1);
  EXPECT_THAT(take<RequestLease>(), SizeIs(1));
  core_->tick(now_ += 1100 * kMillisecond);
  progress(reply.reservation, {0}, 2);
  announce(reply.reservation, 0, true);
  EXPECT_THAT(take<RequestLease>(), IsEmpty());
  EXPECT_EQ(core_->num_reservations(), 0u);
}

TEST_F(LayersPulled, WrongNumbersAreIgnored) {
  const PushReply reply = offered(prompt(16));
  progress(reply.reservation + 1, {0}, 1);
  progress(reply.reservation, {7}, 1);
  progress(reply.reservation, {0}, 5);
  core_->push_progressed({reply.reservation, {0}, 0, 0}, now_);
  EXPECT_THAT(core_->take_actions(), IsEmpty());
}

TEST_F(LayersPulled, NothingIsAskedForWhereFramesWereNotReached) {
  core_.emplace(sizes(16, 16, 8));
  const PushReply reply = offered(prompt(16));
  progress(reply.reservation, {0}, 1);
  EXPECT_THAT(core_->take_actions(), IsEmpty());
}

TEST_F(LayersPulled, AFetchTakesNoChunkThatGrows) {
  NewRequest added = request("r", 33);
  added.source = HandoffSource{"tcp://p:1", "r", 33};
  core_->add_request(added, now_);
  lookup("r");
  answer(take<RequestLease>().at(0), true, 16);
  EXPECT_THAT(take<StartPull>(), IsEmpty());
}

}  // namespace
}  // namespace kvferry::sim
