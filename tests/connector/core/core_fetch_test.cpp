// Tests fetching chunks from other nodes while lookups answer "ask again": the reader's part of leases and pulls.
#include <gmock/gmock.h>

#include "core_bench.h"

namespace kvferry::sim {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;

class Fetching : public CoreBench {
 protected:
  Fetching() : Fetching(sizes(16, 16, 64)) {}
  explicit Fetching(const CoreConfig& config) : CoreBench(config) { core_->set_directory_up(true); }

  static HolderOffer offer(const std::string& name, std::uint32_t num_full_chunks) {
    return {"tcp://" + name, num_full_chunks, {}};
  }
  /// Returns the answer of a holder that has all requested chunks.
  static LeaseReply grant(const RequestLease& wanted, std::uint64_t lease, std::uint32_t num_tokens = 16) {
    LeaseReply reply;
    reply.lease = lease;
    for (std::uint32_t i = 0; i < wanted.request.keys.size(); ++i) reply.chunks.push_back({i, {i, 1}, num_tokens, {5}});
    return reply;
  }
  /// Looks up a request of 64 tokens, and returns the lease request that the core then sends to node `name`.
  RequestLease ask(const std::string& id, const std::string& name) {
    add(id, 64);
    const std::vector<QueryDirectory> queries = take<QueryDirectory>();
    EXPECT_THAT(queries, SizeIs(1));
    core_->directory_answered(queries.at(0).fetch, {offer(name, 4)}, now_);
    const std::vector<RequestLease> leases = take<RequestLease>();
    EXPECT_THAT(leases, SizeIs(1));
    return leases.at(0);
  }
  StartPull pull(const RequestLease& wanted, std::uint64_t lease) {
    core_->lease_answered(wanted.fetch, wanted.endpoint, grant(wanted, lease), now_);
    const std::vector<StartPull> pulls = take<StartPull>();
    EXPECT_THAT(pulls, SizeIs(1));
    return pulls.at(0);
  }
};

TEST_F(Fetching, ARequestsChunksComeByDirectoryLeaseAndPullWhileTheAnswerIsAskAgain) {
  const RequestLease wanted = ask("a", "far");
  EXPECT_EQ(wanted.endpoint, "tcp://far");
  EXPECT_EQ(wanted.request.fingerprint, "model");
  EXPECT_THAT(wanted.request.keys, SizeIs(4));
  EXPECT_TRUE(lookup("a").pending);
  const StartPull pulling = pull(wanted, 9);
  EXPECT_EQ(pulling.lease, 9u);
  EXPECT_EQ(pulling.deadline, now_ + 4 * kSecond);
  EXPECT_TRUE(lookup("a").pending);
  core_->pull_done(pulling.pull, 0, {true, true, true, false}, now_);
  const std::vector<Action> actions = core_->take_actions();
  EXPECT_THAT(actions, SizeIs(4));  // three publications and the release of the lease
  EXPECT_EQ(std::get<ReleaseLease>(actions.back()).lease, 9u);
  const Answer answer = lookup("a");
  EXPECT_FALSE(answer.pending);
  EXPECT_EQ(answer.num_external, 48u);
  EXPECT_EQ(core_->num_fetches(), 0u);
  EXPECT_EQ(core_->pool().num_writing(), 0u);
}

TEST_F(Fetching, WhatOneHolderCouldNotGiveIsAskedOfTheNext) {
  add("a", 64);
  const std::uint64_t fetch = take<QueryDirectory>().at(0).fetch;
  core_->directory_answered(fetch, {offer("one", 4), offer("two", 4), offer("three", 2)}, now_);
  const RequestLease one = take<RequestLease>().at(0);
  const StartPull pulling = pull(one, 9);
  core_->pull_done(pulling.pull, 0, {true, false, true, true}, now_);
  const RequestLease two = take<RequestLease>().at(0);
  EXPECT_EQ(two.endpoint, "tcp://two");
  EXPECT_THAT(two.request.keys, ElementsAre(one.request.keys[1]));
  core_->lease_answered(two.fetch, two.endpoint, {}, now_);  // the second node has no chunks any more
  EXPECT_EQ(take<RequestLease>().at(0).endpoint, "tcp://three");
}

TEST_F(Fetching, AnswersThatComeTooLateAreIgnoredAndTheirLeasesGivenBack) {
  const RequestLease wanted = ask("a", "far");
  core_->tick(now_ += kSecond);  // the holder did not answer in time, and there is no other node to ask
  EXPECT_EQ(core_->num_fetches(), 0u);
  core_->lease_answered(wanted.fetch, wanted.endpoint, grant(wanted, 9), now_);
  const std::vector<ReleaseLease> released = take<ReleaseLease>();
  ASSERT_THAT(released, SizeIs(1));
  EXPECT_EQ(released[0].lease, 9u);
  EXPECT_EQ(released[0].endpoint, "tcp://far");
  core_->directory_answered(wanted.fetch, {offer("far", 4)}, now_);
  EXPECT_TRUE(core_->take_actions().empty());
  EXPECT_EQ(core_->pool().num_writing(), 0u);
}

TEST_F(Fetching, ALeaseForARequestThatLeftIsGivenBack) {
  const RequestLease wanted = ask("a", "far");
  core_->finished(RequestId{"a"}, 0, {{}}, true, now_);
  EXPECT_EQ(core_->num_fetches(), 0u);
  core_->lease_answered(wanted.fetch, wanted.endpoint, grant(wanted, 9), now_);
  EXPECT_THAT(take<ReleaseLease>(), SizeIs(1));
  EXPECT_EQ(core_->pool().num_writing(), 0u);
}

TEST_F(Fetching, APullOutlivesItsRequestAndStillFillsThePool) {
  const StartPull pulling = pull(ask("a", "far"), 9);
  core_->finished(RequestId{"a"}, 0, {{}}, true, now_);
  core_->pull_done(pulling.pull, 0, {true, true, true, true}, now_);
  EXPECT_THAT(take<ReleaseLease>(), SizeIs(1));
  EXPECT_EQ(core_->pool().num_ready(), 4u);
  EXPECT_BREAKS(core_->pull_done(pulling.pull, 0, {true, true, true, true}, now_), "exactly-once");
}

TEST_F(Fetching, AChunkInAFrameIsLoadedAtOnceAndOfferedToOthersWhenItIsInItsSlot) {
  const RequestLease wanted = ask("a", "far");
  const StartPull pulling = pull(wanted, 9);
  core_->pull_done(pulling.pull, 0, {true, true, true, true}, now_, {}, {}, {true, true, true, false});
  EXPECT_THAT(take<PublishChunks>(), SizeIs(1)) << "the last chunk is in its slot";
  EXPECT_EQ(lookup("a").num_external, 63u);
  const LeaseRequest request{"model", wanted.request.keys, {}};
  EXPECT_THAT(core_->lease_requested("reader", request, now_).chunks, SizeIs(1));
  EXPECT_THAT(core_->snapshot(), SizeIs(1));
  core_->slot_written(pulling.items[0].local, 0, true, now_);
  EXPECT_THAT(take<PublishChunks>(), SizeIs(1));
  EXPECT_THAT(core_->lease_requested("reader", request, now_).chunks, SizeIs(2));
  EXPECT_THAT(core_->snapshot(), SizeIs(2));
  EXPECT_BREAKS(core_->slot_written(pulling.items[0].local, 0, true, now_), "exactly-once");
  core_->slot_written(pulling.items[1].local, 0, false, now_);
  EXPECT_EQ(core_->counters().slot_copies_failed, 1u);
  EXPECT_EQ(core_->pool().find(wanted.request.keys[1]), nullptr) << "a chunk without a slot is dropped";
  EXPECT_THAT(take<PublishChunks>(), SizeIs(0));
}

TEST_F(Fetching, TheSlotOfAChunkInAFrameIsKeptThoughTheCacheIsReset) {
  core_.emplace(sizes(16, 16, 4));
  core_->set_directory_up(true);
  const StartPull pulling = pull(ask("a", "far"), 9);
  core_->pull_done(pulling.pull, 0, {true, true, true, true}, now_, {}, {}, {true, true, true, true});
  core_->reset_cache();
  EXPECT_THAT(take<AnnounceEvictions>(), SizeIs(0)) << "nobody was told of these chunks";
  core_->finished(RequestId{"a"}, 0, {{}}, true, now_);
  const RequestLease wanted = ask("b", "far");
  core_->lease_answered(wanted.fetch, wanted.endpoint, grant(wanted, 10), now_);
  EXPECT_THAT(take<StartPull>(), SizeIs(0)) << "no slot is free";
  core_->finished(RequestId{"b"}, 0, {{}}, true, now_);
  for (const PullItem& item : pulling.items) core_->slot_written(item.local, 0, true, now_);
  EXPECT_THAT(take<PublishChunks>(), SizeIs(0));
  EXPECT_THAT(pull(ask("c", "far"), 11).items, SizeIs(4));
}

TEST_F(Fetching, WhatTheSourceHadInFramesOnlyAndWasNotPulledIsAskedForOnceMore) {
  NewRequest added = request("a", 33);
  added.source = HandoffSource{"tcp://far", "hand", 32};
  core_->add_request(added, now_);
  const RequestLease first = take<RequestLease>().at(0);
  LeaseReply reply = grant(first, 9);
  for (LeasedChunk& chunk : reply.chunks) chunk.lacks_slots = true;
  core_->lease_answered(first.fetch, first.endpoint, reply, now_);
  const StartPull pulling = take<StartPull>().at(0);
  EXPECT_TRUE(pulling.items.at(1).lacks_slots);
  TransferEnd end;
  end.num_in_frames = end.num_past_frames = 1;
  core_->pull_done(pulling.pull, 0, {true, false}, now_, {}, end);
  std::vector<Action> actions = core_->take_actions();
  ASSERT_THAT(actions, SizeIs(2)) << "a publication and a request; the lease is kept";
  const RequestLease second = std::get<RequestLease>(actions.back());
  EXPECT_EQ(second.endpoint, "tcp://far");
  EXPECT_THAT(second.request.keys, SizeIs(1));
  EXPECT_EQ(second.request.handoff, "hand");
  EXPECT_FALSE(second.request.is_sure_of_frames);
  core_->lease_answered(second.fetch, second.endpoint, grant(second, 10), now_);
  const StartPull again = take<StartPull>().at(0);
  core_->pull_done(again.pull, 0, {true}, now_);
  EXPECT_THAT(take<ReleaseLease>(), SizeIs(2));
  core_->set_directory_up(false);
  core_->tick(now_ += 2 * kSecond);
  EXPECT_EQ(lookup("a").num_external, 32u);
}

TEST_F(Fetching, WhatASourceWhoseFramesWereReachedDoesNotLeaseIsAskedForOnceMore) {
  const auto fetch = [&](const std::string& id, std::size_t num_tokens) {
    NewRequest added = request(id, num_tokens);
    added.source = HandoffSource{"tcp://far", "hand", static_cast<std::uint32_t>(num_tokens)};
    core_->add_request(added, now_);
    return take<RequestLease>().at(0);
  };
  TransferEnd end;
  end.num_in_frames = 1;
  core_->pull_done(pull(fetch("a", 17), 9).pull, 0, {true}, now_, {}, end);
  core_->take_actions();
  const RequestLease first = fetch("b", 49);
  EXPECT_TRUE(first.request.is_sure_of_frames);
  LeaseReply reply = grant(first, 10);
  reply.chunks.pop_back();  // the holder could not pin the chunk's frame
  core_->lease_answered(first.fetch, first.endpoint, reply, now_);
  core_->pull_done(take<StartPull>().at(0).pull, 0, {true}, now_, {}, end);
  const RequestLease second = take<RequestLease>().at(0);
  EXPECT_EQ(second.endpoint, "tcp://far");
  EXPECT_THAT(second.request.keys, ElementsAre(first.request.keys.back()));
  core_->lease_answered(second.fetch, second.endpoint, {}, now_);
  EXPECT_THAT(take<QueryDirectory>(), SizeIs(1)) << "it has not got the chunk";
}

TEST_F(Fetching, ADoubledGrantDoesNotGiveBackTheLeaseThatIsBeingRead) {
  const RequestLease wanted = ask("a", "far");
  pull(wanted, 9);
  core_->lease_answered(wanted.fetch, wanted.endpoint, grant(wanted, 9), now_);
  EXPECT_THAT(take<ReleaseLease>(), SizeIs(0));
  core_->lease_answered(wanted.fetch, wanted.endpoint, grant(wanted, 10), now_);  // another lease for the same chunks
  EXPECT_THAT(take<ReleaseLease>(), SizeIs(1));
}

TEST_F(Fetching, AnAnswerOfANodeThatWasNotAskedIsNotTaken) {
  const RequestLease wanted = ask("a", "far");
  core_->lease_answered(wanted.fetch, "tcp://liar", grant(wanted, 9), now_);
  std::vector<Action> actions = core_->take_actions();
  ASSERT_THAT(actions, SizeIs(1));
  EXPECT_EQ(std::get<ReleaseLease>(actions[0]).endpoint, "tcp://liar");
  EXPECT_EQ(core_->counters().unasked_answers, 1u);
  EXPECT_EQ(pull(wanted, 10).endpoint, "tcp://far");
}

TEST_F(Fetching, AnEndpointThatDidNotAnswerIsLeftAloneForAWhile) {
  ask("a", "far");
  core_->tick(now_ += kSecond);
  add("b", 64);
  core_->directory_answered(take<QueryDirectory>().at(0).fetch, {offer("far", 4), offer("near", 4)}, now_);
  EXPECT_EQ(take<RequestLease>().at(0).endpoint, "tcp://near");
  core_->tick(now_ += 6 * kSecond);
  core_->take_actions();
  add("c", 64);
  core_->directory_answered(take<QueryDirectory>().at(0).fetch, {offer("far", 4)}, now_);
  EXPECT_EQ(take<RequestLease>().at(0).endpoint, "tcp://far");
}

/// One holder has all chunks and grants every lease. If a test says so, the holder's bytes never arrive.
class FetchingThroughAFirewall : public Fetching {
 protected:
  static constexpr TimeNs kPullTime = 4 * kSecond;  // CoreConfig::pull_timeout
  /// Returns the pull, if the core begins one. Each request has different tokens, so none of its chunks is in the pool.
  std::optional<StartPull> try_to_fetch(const std::string& id) {
    std::ranges::fill(tokens_, ++num_requests_);
    add(id, 64);
    core_->directory_answered(take<QueryDirectory>().at(0).fetch, {offer("far", 4)}, now_);
    const std::vector<RequestLease> leases = take<RequestLease>();
    if (leases.empty()) return std::nullopt;
    return pull(leases[0], ++num_requests_);
  }
  void end(const StartPull& pull, bool ok) { core_->pull_done(pull.pull, 0, std::vector<bool>(4, ok), now_); }

  std::int32_t num_requests_ = 0;
};

TEST_F(FetchingThroughAFirewall, OneRequestAMinuteWaitsForANodeWhoseBytesNeverArrive) {
  TimeNs waited = 0;
  for (const TimeNs ends = now_ + 600 * kSecond; now_ < ends; now_ += kSecond) {
    core_->tick(now_);
    const auto pulling = try_to_fetch("r-" + std::to_string(num_requests_));
    if (!pulling) continue;
    now_ += kPullTime;
    waited += kPullTime;
    end(*pulling, false);
  }
  EXPECT_LE(waited, 14 * kPullTime);  // the waits are 5, 10, 20, 40, then 60 seconds
  EXPECT_GE(waited, 11 * kPullTime);
  EXPECT_EQ(core_->counters().holders_suspected, static_cast<std::uint64_t>(waited / kPullTime));
}

TEST_F(FetchingThroughAFirewall, OneFetchAtATimeTriesTheNodeAndTheFirstThatSucceedsLetsTheOthersThrough) {
  const auto first = try_to_fetch("first");
  const auto second = try_to_fetch("second");
  now_ += kPullTime;
  end(*first, false);
  end(*second, false);  // this pull began before the node was suspected
  const std::vector<LogLine> lines = take<LogLine>();
  ASSERT_THAT(lines, SizeIs(1));
  EXPECT_EQ(lines[0].paused_node, "tcp://far");
  EXPECT_THAT(lines[0].text,
              HasSubstr("no intact chunk came from node tcp://far within 1000 ms; no KV is fetched from it for 5 s"));
  EXPECT_FALSE(try_to_fetch("while-closed"));
  core_->tick(now_ += 5 * kSecond);
  std::ranges::fill(tokens_, ++num_requests_);
  add("nothing-there", 64);
  core_->directory_answered(take<QueryDirectory>().at(0).fetch, {offer("far", 4)}, now_);
  core_->lease_answered(take<RequestLease>().at(0).fetch, "tcp://far", {}, now_);
  const auto trial = try_to_fetch("trial");
  ASSERT_TRUE(trial);
  EXPECT_FALSE(try_to_fetch("beside-the-trial"));
  end(*trial, true);
  EXPECT_TRUE(try_to_fetch("after-the-trial"));
  EXPECT_TRUE(try_to_fetch("beside-that"));
}

TEST_F(FetchingThroughAFirewall, APullThatFailsAtOnceClosesNothingOff) {
  end(*try_to_fetch("refused"), false);
  EXPECT_TRUE(try_to_fetch("next"));
  EXPECT_EQ(core_->counters().holders_suspected, 0u);
}

TEST_F(FetchingThroughAFirewall, OneSilentRankIsEnough) {
  CoreConfig config = sizes(16, 16, 64);
  config.num_ranks = 2;
  core_.emplace(config);
  add("a", 64);
  core_->directory_answered(take<QueryDirectory>().at(0).fetch, {offer("far", 4)}, now_);
  const RequestLease wanted = take<RequestLease>().at(0);
  LeaseReply reply = grant(wanted, 9);
  for (LeasedChunk& chunk : reply.chunks) chunk.checksums = {5, 5};
  core_->lease_answered(wanted.fetch, wanted.endpoint, reply, now_);
  const StartPull pulling = take<StartPull>().at(0);
  end(pulling, true);
  core_->pull_done(pulling.pull, 1, std::vector<bool>(4, false), now_ += kPullTime);
  EXPECT_EQ(core_->counters().holders_suspected, 1u);
}

TEST_F(Fetching, ARefusalIsToldInTheLogAndEndsTheWaiting) {
  const RequestLease wanted = ask("a", "far");
  LeaseReply refusal;
  refusal.refused = "the two nodes serve different models";
  core_->lease_answered(wanted.fetch, wanted.endpoint, refusal, now_);
  const std::vector<LogLine> lines = take<LogLine>();
  ASSERT_THAT(lines, SizeIs(1));
  EXPECT_TRUE(lines[0].warning);
  EXPECT_THAT(lines[0].text,
              HasSubstr("node tcp://far leases no KV for request a: the two nodes serve different models"));
  EXPECT_FALSE(lookup("a").pending);
}

TEST_F(Fetching, ASilentDirectoryEndsTheWaiting) {
  add("a", 64);
  EXPECT_TRUE(lookup("a").pending);
  core_->tick(now_ += kSecond);
  EXPECT_FALSE(lookup("a").pending);
  EXPECT_EQ(core_->counters().fetch_timeouts, 1u);
}

TEST_F(Fetching, APullThatNeverEndsEndsTheWaitingAtTheLoadTimeoutAndIsTakenInLater) {
  const StartPull pulling = pull(ask("a", "far"), 9);
  EXPECT_TRUE(lookup("a").pending);
  now_ += 5 * kSecond;
  const Answer answer = lookup("a");
  EXPECT_FALSE(answer.pending);
  EXPECT_EQ(answer.num_external, 0u);
  core_->allocated(RequestId{"a"}, 0, {blocks(1, 4)}, now_);
  build({{{RequestId{"a"}, 0, 64, BlockTable{blocks(1, 4)}}}, {}});  // this does not save chunks that are being pulled
  core_->pull_done(pulling.pull, 0, {true, true, true, true}, now_);
  EXPECT_EQ(core_->pool().num_ready(), 4u);
}

TEST_F(Fetching, TwoRequestsThatWantTheSameChunksFetchThemOnce) {
  const StartPull pulling = pull(ask("a", "far"), 9);
  add("b", 64);
  core_->directory_answered(take<QueryDirectory>().at(0).fetch, {offer("far", 4)}, now_);
  EXPECT_THAT(take<RequestLease>(), SizeIs(0));
  EXPECT_TRUE(lookup("b").pending);  // the chunks are being pulled
  core_->pull_done(pulling.pull, 0, {true, true, true, true}, now_);
  EXPECT_EQ(lookup("a").num_external, 63u);
  EXPECT_EQ(lookup("b").num_external, 63u);
  EXPECT_EQ(core_->counters().pulls, 1u);
}

TEST_F(Fetching, NobodyWaitsForWhatTheEngineHasByItself) {
  ask("a", "far");
  EXPECT_FALSE(lookup("a", 63).pending);
}

TEST_F(Fetching, WhatNobodyHadIsNotAskedForAgainAtOnce) {
  add("a", 64);
  core_->directory_answered(take<QueryDirectory>().at(0).fetch, {}, now_);
  EXPECT_FALSE(lookup("a").pending);
  build();  // refused
  EXPECT_FALSE(lookup("a").pending);
  EXPECT_THAT(take<QueryDirectory>(), SizeIs(0));
  build();
  now_ += 100 * kMillisecond;
  EXPECT_TRUE(lookup("a").pending);
  EXPECT_THAT(take<QueryDirectory>(), SizeIs(1));
}

TEST_F(Fetching, TheHandOffsNodeIsAskedFirstAndAloneWithoutADirectory) {
  core_->set_directory_up(false);
  NewRequest from_prefill = request("a", 40);
  from_prefill.source = HandoffSource{"tcp://prefill", "p-1", 40};
  core_->add_request(from_prefill, now_);
  const std::vector<RequestLease> leases = take<RequestLease>();
  ASSERT_THAT(leases, SizeIs(1));
  EXPECT_EQ(leases[0].endpoint, "tcp://prefill");
  EXPECT_EQ(leases[0].request.handoff, "p-1");
  EXPECT_THAT(leases[0].request.keys, SizeIs(3));  // two chunks and the tail of 8
  LeaseReply reply = grant(leases[0], 9);
  reply.chunks[2].num_tokens = 8;
  core_->lease_answered(leases[0].fetch, leases[0].endpoint, reply, now_);
  core_->pull_done(take<StartPull>().at(0).pull, 0, {true, true, true}, now_);
  EXPECT_EQ(lookup("a").num_external, 39u);
}

TEST_F(Fetching, TheHandOffsNodeIsAskedLaterIfWhatWasOnItsWayDidNotArrive) {
  const auto handed_over = [&](const std::string& id) {
    NewRequest added = request(id, 40);
    added.source = HandoffSource{"tcp://prefill", "p-" + id, 40};
    core_->add_request(added, now_);
  };
  handed_over("a");
  const RequestLease first = take<RequestLease>().at(0);
  LeaseReply reply = grant(first, 9);
  reply.chunks[2].num_tokens = 8;
  core_->lease_answered(first.fetch, first.endpoint, reply, now_);
  const StartPull pulling = take<StartPull>().at(0);
  handed_over("b");  // the pull for "a" is writing the chunks of b
  handed_over("c");
  const std::vector<QueryDirectory> queries = take<QueryDirectory>();
  ASSERT_THAT(queries, SizeIs(2));
  core_->directory_answered(queries[1].fetch, {}, now_);  // the fetch for c ends before the pull for "a"
  core_->pull_done(pulling.pull, 0, {false, false, false}, now_);
  take<RequestLease>();
  EXPECT_TRUE(lookup("c").pending);
  EXPECT_EQ(take<RequestLease>().at(0).request.handoff, "p-c");
  core_->directory_answered(queries[0].fetch, {}, now_);
  EXPECT_TRUE(lookup("b").pending);
  const std::vector<RequestLease> leases = take<RequestLease>();
  ASSERT_THAT(leases, SizeIs(1));
  EXPECT_EQ(leases[0].request.handoff, "p-b");
  EXPECT_THAT(leases[0].request.keys, SizeIs(3));  // the directory does not know the tail of 8
}

TEST_F(Fetching, AGrantThatDoesNotFitIsNotPulled) {
  const RequestLease wanted = ask("a", "far");
  LeaseReply reply = grant(wanted, 9);
  reply.chunks[0].num_tokens = 15;          // a different length from the requested one
  reply.chunks[1].checksums = {5, 6};       // a wrong number of ranks
  reply.chunks[2].index = 77;               // an index that was not requested
  reply.chunks[3].index = 0;                // the index of the first chunk
  reply.chunks.push_back(reply.chunks[3]);  // twice
  core_->lease_answered(wanted.fetch, wanted.endpoint, reply, now_);
  const std::vector<StartPull> pulls = take<StartPull>();
  ASSERT_THAT(pulls, SizeIs(1));
  EXPECT_THAT(pulls[0].items, SizeIs(1));
}

TEST_F(Fetching, WhatAnotherShapeGivesHasTheChecksumThatOurRankFound) {
  const RequestLease wanted = ask("a", "far");
  LeaseReply reply = grant(wanted, 9);
  for (LeasedChunk& chunk : reply.chunks) {
    chunk.checksums.clear();
    chunk.run_checksums = {{7, 8}};
  }
  reply.chunks[3].run_checksums = {{7, 8}, {7, 8}};  // checksums from more ranks than this node has
  core_->lease_answered(wanted.fetch, wanted.endpoint, reply, now_);
  const StartPull pulling = take<StartPull>().at(0);
  ASSERT_THAT(pulling.items, SizeIs(3));
  EXPECT_THAT(pulling.items[0].run_checksums, ElementsAre(ElementsAre(7, 8)));
  core_->pull_done(pulling.pull, 0, {true, true, true}, now_, {70, 71});  // there is no checksum for the last chunk
  EXPECT_EQ(core_->counters().pulled_chunks, 2u);
  EXPECT_EQ(core_->counters().pull_failures, 1u);
  EXPECT_THAT(core_->pool().slot(pulling.items[0].local.slot).checksums, ElementsAre(70));
  EXPECT_THAT(core_->pool().slot(pulling.items[1].local.slot).checksums, ElementsAre(71));
}

class FetchingIntoASmallPool : public Fetching {
 protected:
  FetchingIntoASmallPool() : Fetching(sizes(16, 16, 2)) {}
};

TEST_F(FetchingIntoASmallPool, TakesWhatFitsAndCountsTheRest) {
  const StartPull pulling = pull(ask("a", "far"), 9);
  EXPECT_THAT(pulling.items, SizeIs(2));
  EXPECT_EQ(core_->counters().pool_full, 1u);
  core_->pull_done(pulling.pull, 0, {true, true}, now_);
  EXPECT_EQ(lookup("a").num_external, 32u);
}

}  // namespace
}  // namespace kvferry::sim
