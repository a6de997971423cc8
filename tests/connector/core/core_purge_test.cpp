// Tests what is known of a chunk's givers, and the order to purge what one of them gave.
#include <gmock/gmock.h>

#include "core_bench.h"

namespace kvferry::sim {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

/// A node whose requests get the first two chunks of their prompt from the node "tcp://bad", which has them from
/// "tcp://first".
class Purging : public CoreBench {
 protected:
  static CoreConfig named() {
    CoreConfig config = sizes(16, 16, 64);
    config.endpoint = "tcp://self";
    config.chunk_bytes = 1600;
    return config;
  }
  Purging() : CoreBench(named()) { core_->set_directory_up(true); }

  /// Makes a request ask `endpoint` for the chunks before `num_tokens`. Returns the pull that its answer starts.
  std::vector<StartPull> fetch(const std::string& id, std::uint32_t num_tokens, const std::string& endpoint,
                               const Givers& givers, const std::string& member = {}) {
    add(id, num_tokens);
    for (const QueryDirectory& query : take<QueryDirectory>())
      core_->directory_answered(query.fetch, {{endpoint, num_tokens / 16, {}, member}}, now_);
    return leased(endpoint, givers);
  }
  /// Adds a request whose prompt the member "bad" has handed over under another address than its own.
  void hand_over(const std::string& id) {
    NewRequest added = request(id, 33);
    added.source = HandoffSource{"tcp://another", "h", 33, "bad"};
    core_->add_request(added, now_);
  }
  /// Answers the requests for leases. Returns the pull that this starts.
  std::vector<StartPull> leased(const std::string& endpoint, const Givers& givers) {
    for (const RequestLease& wanted : take<RequestLease>()) {
      LeaseReply reply{9, {}, {}};
      for (std::uint32_t i = 0; i < wanted.request.keys.size(); ++i) {
        reply.chunks.push_back({i, {i, 1}, 16, {5}});
        reply.chunks.back().givers = givers;
      }
      core_->lease_answered(wanted.fetch, endpoint, reply, now_);
    }
    return take<StartPull>();
  }
  void pulled(const std::vector<StartPull>& pulls) {
    for (const StartPull& pull : pulls)
      core_->pull_done(pull.pull, 0, std::vector<bool>(pull.items.size(), true), now_);
  }
  /// Admits a request with what the pool has, computes the rest of its `num_tokens`, and saves all full chunks.
  void run(const std::string& id, std::uint32_t num_tokens, std::uint32_t num_local = 0) {
    const std::uint32_t loaded = lookup(id, num_local).num_external, computed = num_local + loaded;
    const BlockTable table{blocks(1, (num_tokens + 15) / 16)};
    core_->allocated(RequestId{id}, loaded, table, now_);
    build({{{RequestId{id}, computed, num_tokens - computed, table}}, {}});
  }
  void finish(const std::string& id, std::uint32_t num_tokens) {
    core_->finished(RequestId{id}, num_tokens, {blocks(1, (num_tokens + 15) / 16)}, false, now_);
    build();
  }
  const ChunkPool::Slot* slot(std::uint32_t chunk) {
    TokenChain chain(root_key("model", ""), 16, {});
    chain.append(std::span(tokens_).first(16 * (chunk + 1)));
    return core_->pool().find(chain.key(chunk));
  }
  Givers givers_of(std::uint32_t chunk) {
    const ChunkPool::Slot* const found = slot(chunk);
    return found == nullptr ? Givers{"not there"} : found->givers;
  }
  /// Serves a request of 70 tokens, whose first two chunks another node gives.
  void serve_from(const std::string& endpoint, const Givers& givers) {
    pulled(fetch("a", 33, endpoint, givers));
    finish("a", 0);
    add("b", 70);
    core_->take_actions();
    core_->tick(now_ += 5 * kSecond);
    run("b", 70);
  }
};

TEST_F(Purging, ACopyHasThoseThatGaveItAndWhatIsComputedOnItHasThemToo) {
  serve_from("tcp://bad", {"tcp://first"});
  EXPECT_THAT(givers_of(0), ElementsAre("tcp://bad", "tcp://first"));
  EXPECT_THAT(givers_of(1), ElementsAre("tcp://bad", "tcp://first"));
  EXPECT_THAT(givers_of(2), ElementsAre("tcp://bad", "tcp://first")) << "it was computed from the first two";
  const LeaseReply reply = core_->lease_requested("reader", {"model", {slot(2)->meta.key}, {}}, now_);
  EXPECT_THAT(reply.chunks.at(0).givers, ElementsAre("tcp://bad", "tcp://first"));
}

TEST_F(Purging, WhatANodeComputesFromNothingOfOthersHasNoGivers) {
  core_->set_directory_up(false);
  cache(48);
  EXPECT_THAT(givers_of(2), IsEmpty());
}

TEST_F(Purging, APurgeDropsWhatTheNodeGaveAndWhatWasComputedFromItAndNothingElse) {
  core_->set_directory_up(false);
  tokens_[0] += 1;
  cache(48);  // another prompt
  tokens_[0] -= 1;
  core_->set_directory_up(true);
  serve_from("tcp://bad", {});
  core_->purge_ordered(7, "tcp://other", now_);
  EXPECT_EQ(core_->last_purge().num_chunks, 0u);
  EXPECT_EQ(core_->last_purge().num_of_engine, 0u);
  core_->take_actions();
  core_->purge_ordered(8, "tcp://bad", now_);
  EXPECT_EQ(core_->last_purge().id, 8u);
  EXPECT_EQ(core_->last_purge().num_chunks, 4u) << "two that it gave, two that were computed from them";
  EXPECT_EQ(core_->last_purge().num_bytes, 6400u);
  EXPECT_EQ(core_->last_purge().num_of_engine, 1u);
  EXPECT_EQ(core_->counters().purged_chunks, 4u);
  EXPECT_EQ(core_->pool().num_ready(), 3u);
  EXPECT_EQ(slot(0), nullptr);
  const std::vector<AnnounceEvictions> announced = take<AnnounceEvictions>();
  ASSERT_THAT(announced, SizeIs(1));
  EXPECT_THAT(announced[0].keys, SizeIs(4));
  core_->purge_ordered(8, "tcp://bad", now_);
  EXPECT_EQ(core_->last_purge().num_chunks, 4u) << "the order was repeated";
}

TEST_F(Purging, AnOrderThatIsRepeatedDropsNothingOfTheProcessThatIsAdmittedSince) {
  core_->purge_ordered(1, "tcp://bad", now_);
  core_->admit_ordered("tcp://bad");
  serve_from("tcp://bad", {"?"});
  const std::size_t num_ready = core_->pool().num_ready();
  EXPECT_GT(num_ready, 0u);
  core_->purge_ordered(1, "tcp://bad", now_);
  core_->admit_ordered("tcp://bad");
  EXPECT_EQ(core_->pool().num_ready(), num_ready);
  core_->purge_ordered(2, "tcp://bad", now_);
  EXPECT_EQ(core_->pool().num_ready(), 0u);
}

TEST_F(Purging, ANodeInTheMiddleOfTheWayIsPurgedToo) {
  serve_from("tcp://good", {"tcp://bad", "tcp://first"});
  core_->purge_ordered(1, "tcp://bad", now_);
  EXPECT_EQ(core_->pool().num_ready(), 0u);
}

TEST_F(Purging, WhoseGiversAreUnknownIsPurgedWithAnyone) {
  serve_from("tcp://old", {"?"});
  core_->purge_ordered(1, "tcp://bad", now_);
  EXPECT_EQ(core_->pool().num_ready(), 0u);
}

TEST_F(Purging, ARunningRequestGoesOnButNothingMoreOfItIsSaved) {
  serve_from("tcp://bad", {});
  core_->purge_ordered(1, "tcp://bad", now_);
  core_->update_tokens(RequestId{"b"}, 70, std::span(tokens_).subspan(70, 30));
  const BlockTable table{blocks(1, 7)};
  build({{{RequestId{"b"}, 70, 30, table}}, {}});
  EXPECT_EQ(core_->finished(RequestId{"b"}, 100, table, false, now_).known, true);
  build();
  EXPECT_EQ(core_->pool().num_ready() + core_->pool().num_writing(), 0u);
}

TEST_F(Purging, WhatIsOnItsWayIsDroppedWhenItIsThere) {
  const std::vector<StartPull> pulls = fetch("a", 33, "tcp://bad", {});
  ASSERT_THAT(pulls, SizeIs(1));
  core_->purge_ordered(1, "tcp://bad", now_);
  pulled(pulls);
  EXPECT_EQ(core_->pool().num_ready(), 0u);
  EXPECT_EQ(core_->last_purge().num_chunks, 2u);
}

TEST_F(Purging, NothingIsTakenFromAPurgedNodeUntilItStartedAnewOrADayHasPassed) {
  core_->purge_ordered(1, "tcp://bad", now_);
  EXPECT_THAT(fetch("a", 33, "tcp://bad", {}), IsEmpty());
  EXPECT_THAT(fetch("b", 33, "tcp://good", {"tcp://bad"}), IsEmpty());
  PushOffer offer{"model", 1, {}, {{root_key("pushed", ""), 16, {}}}, 0, "tcp://bad"};
  EXPECT_THAT(core_->push_offered("p", offer, now_).refused,
              HasSubstr("node tcp://bad is not accepted: an operator has purged it"));
  core_->replicate_ordered({"tcp://bad", {{root_key("copied", ""), 16, false, {}}}, kSecond}, now_);
  EXPECT_THAT(take<RequestLease>(), IsEmpty());
  core_->admit_ordered("tcp://bad");
  EXPECT_THAT(fetch("c", 33, "tcp://bad", {}), SizeIs(1));
  core_->purge_ordered(2, "tcp://bad", now_);
  core_->tick(now_ += core_->config().order_ttl_max);
  EXPECT_EQ(core_->provenance().num_purged(), 0u);
}

TEST_F(Purging, APushedChunkHasItsSenderAndThoseThatTheSettlementTells) {
  const ChunkKey key = root_key("pushed", "");
  PushOffer offer{"model", 1, {}, {{key, 16, {}}}, 0, "tcp://p"};
  const std::uint64_t reservation = core_->push_offered("p", offer, now_).reservation;
  core_->push_settled({reservation, {{0, true, 0, {5}, {}, {"tcp://before"}}}}, now_);
  core_->push_revoked(take<RevokeSlots>().at(0), now_);
  EXPECT_THAT(core_->pool().find(key)->givers, ElementsAre("tcp://before", "tcp://p"));
}

TEST_F(Purging, APusherWithANameLongerThanAnyEndpointIsUnknown) {
  PushOffer offer{"model", 1, {}, {{root_key("pushed", ""), 16, {}}}, 0, std::string(1 << 20, 'x')};
  core_->push_offered("p", offer, now_);
  EXPECT_THAT(core_->pool().find(root_key("pushed", ""))->givers, ElementsAre("?"));
  core_->purge_ordered(1, "tcp://bad", now_);
  EXPECT_THAT(core_->push_offered("p", offer, now_).refused, HasSubstr("may be one that an operator has purged"))
      << "it may be the bad one";
}

TEST_F(Purging, AChunkThatAPurgedNodeGaveToThePushingOneIsNotTaken) {
  PushOffer offer{"model", 1, {}, {{root_key("pushed", ""), 16, {}}}, 0, "tcp://p"};
  const std::uint64_t reservation = core_->push_offered("p", offer, now_).reservation;
  core_->purge_ordered(1, "tcp://bad", now_);
  core_->push_settled({reservation, {{0, true, 0, {5}, {}, {"tcp://bad"}}}}, now_);
  core_->push_revoked(take<RevokeSlots>().at(0), now_);
  EXPECT_EQ(core_->pool().num_ready(), 0u);
}

TEST_F(Purging, BlocksOfTheEnginesCacheKeepTheGiversOfWhatWasLoadedIntoThem) {
  serve_from("tcp://bad", {});
  finish("b", 70);
  core_->evict_ordered(
      std::vector<ChunkKey>{slot(0)->meta.key, slot(1)->meta.key, slot(2)->meta.key, slot(3)->meta.key});
  core_->set_directory_up(false);
  add("c", 90);
  run("c", 90, 64);  // the engine still has 64 tokens of the request before
  EXPECT_THAT(givers_of(4), Contains("tcp://bad")) << "computed from blocks that were loaded";
}

TEST_F(Purging, ATailThatWasLoadedIntoTheEnginesCacheCountsForWhatFollowsIt) {
  TokenChain chain(root_key("model", ""), 16, {});
  chain.append(std::span(tokens_).first(30));
  Provenance provenance;
  EXPECT_EQ(provenance.loaded_at(after(chain.root())), nullptr);
  provenance.loaded(after(chain.root()), {"a"});
  EXPECT_THAT(*provenance.loaded_at(after(chain.root())), ElementsAre("a"));
  EXPECT_EQ(provenance.loaded_at(chain.root()), nullptr);
}

TEST_F(Purging, AMemberIsFoundByItsNameUnderWhateverAddressItPushed) {
  const ChunkKey key = root_key("pushed", "");
  PushOffer offer{"model", 1, {}, {{key, 16, {}}}, 0, "tcp://another"};
  const std::uint64_t reservation = core_->push_offered("p", offer, now_, "bad").reservation;
  core_->push_settled({reservation, {{0, true, 0, {5}, {}, {}}}}, now_);
  core_->push_revoked(take<RevokeSlots>().at(0), now_);
  EXPECT_THAT(core_->pool().find(key)->givers, ElementsAre("member:bad", "tcp://another"));
  core_->purge_ordered(1, "tcp://bad", now_);
  EXPECT_EQ(core_->pool().num_ready(), 1u);
  core_->purge_ordered(2, "member:bad", now_);
  EXPECT_EQ(core_->pool().num_ready(), 0u);
  EXPECT_EQ(core_->last_purge().num_chunks, 1u);
  EXPECT_THAT(core_->push_offered("p", offer, now_, "bad").refused,
              HasSubstr("node tcp://another of member 'bad' is not accepted: an operator has purged it"));
  EXPECT_EQ(core_->push_offered("p", offer, now_, "good").refused, "") << "another member's node has this address too";
  core_->admit_ordered("member:bad");
  EXPECT_EQ(core_->push_offered("p", offer, now_, "bad").refused, "");
}

TEST_F(Purging, AMemberIsFoundByItsNameUnderWhateverAddressItHandedOver) {
  core_->set_directory_up(false);
  hand_over("a");
  pulled(leased("tcp://another", {"tcp://first"}));
  EXPECT_THAT(givers_of(0), ElementsAre("member:bad", "tcp://another", "tcp://first"));
  const LeaseReply reply = core_->lease_requested("reader", {"model", {slot(0)->meta.key}, {}}, now_);
  EXPECT_THAT(reply.chunks.at(0).givers, Contains("member:bad")) << "the next reader of the copy knows too";
  core_->purge_ordered(1, "member:bad", now_);
  EXPECT_EQ(core_->pool().num_ready(), 0u);
  hand_over("b");
  EXPECT_THAT(take<RequestLease>(), IsEmpty());
}

TEST_F(Purging, AMemberIsFoundByItsNameInWhatTheControllerNamed) {
  core_->replicate_ordered({"tcp://far", {{root_key("copied", ""), 16, false, {}}}, kSecond, "bad"}, now_);
  pulled(leased("tcp://far", {}));
  EXPECT_THAT(core_->pool().find(root_key("copied", ""))->givers, ElementsAre("member:bad", "tcp://far"));
  pulled(fetch("a", 33, "tcp://near", {}, "bad"));
  EXPECT_THAT(givers_of(0), ElementsAre("member:bad", "tcp://near"));
  core_->purge_ordered(1, "member:bad", now_);
  EXPECT_EQ(core_->pool().num_ready(), 0u);
  core_->replicate_ordered({"tcp://far", {{root_key("copied", ""), 16, false, {}}}, kSecond, "bad"}, now_);
  EXPECT_THAT(fetch("b", 33, "tcp://near", {}, "bad"), IsEmpty());
  EXPECT_EQ(core_->num_replications(), 0u);
}

TEST_F(Purging, ANodeOfThePurgedMemberDropsAllThatItHas) {
  CoreConfig config = named();
  config.member = "bad";
  core_.emplace(config);
  core_->set_directory_up(false);
  cache(48);
  core_->purge_ordered(1, "member:", now_);
  core_->purge_ordered(2, "member:ba", now_);
  EXPECT_EQ(core_->pool().num_ready(), 3u);
  core_->purge_ordered(3, "member:bad", now_);
  EXPECT_EQ(core_->pool().num_ready(), 0u);
}

TEST_F(Purging, ThePurgedNodeItselfDropsAllThatItHas) {
  core_->set_directory_up(false);
  cache(48);
  core_->purge_ordered(1, "tcp://self", now_);
  EXPECT_EQ(core_->pool().num_ready(), 0u);
  EXPECT_EQ(core_->last_purge().num_of_engine, 1u);
}

TEST(Givers, AreBoundedAndThenUnknown) {
  Givers givers;
  for (int i = 0; i < 32; ++i) add_givers(givers, {std::to_string(i)});
  EXPECT_THAT(givers, SizeIs(32));
  add_givers(givers, {"31"});
  EXPECT_THAT(givers, SizeIs(32));
  add_givers(givers, {"one more"});
  EXPECT_THAT(givers, ElementsAre("?"));
  Givers other;
  add_givers(other, {std::string(513, 'x')});
  EXPECT_THAT(other, ElementsAre("?"));
}

}  // namespace
}  // namespace kvferry::sim
