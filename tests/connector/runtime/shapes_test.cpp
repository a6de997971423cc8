// Tests nodes of different shapes with the real transport, ZeroMQ and a controller: each node reads what the other one
// computed.
#include "connector/runtime/links/shapes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "tests/connector/runtime/shaped_node.h"
#include "tests/connector/runtime/test_node.h"

namespace kvferry {
namespace {

/// Returns shapes of tp x pp ranks, with uneven stages, replicated heads, and different block sizes and layouts.
std::vector<NodeShape> shapes() {
  return {{1, {4}},
          {2, {4}},
          {4, {4}},
          {8, {4}},
          {1, {2, 2}},
          {2, {2, 2}},
          {1, {1, 3}, 4, 2, 8},
          {2, {3, 1}, 4, 2, 8, false}};
}

void check_all_pairs(std::vector<NodeShape> shapes) {
  TestController controller;
  for (std::size_t i = 0; i < shapes.size(); ++i) {
    ShapedNode prefiller(controller.endpoint(), "prefill_" + std::to_string(i), shapes[i]);
    const auto prompt = tokens(21, static_cast<std::int32_t>(1000 * i));
    const HandoffSource source = prefiller.prefill("p", prompt, 1);
    ASSERT_EQ(source.num_tokens, 21u);
    for (const NodeShape& shape : shapes) {
      ShapedNode decoder(controller.endpoint(), "decode", shape);
      const ShapedNode::Loaded loaded = decoder.load("d", prompt, source, 1);
      EXPECT_EQ(loaded.tokens, 20u) << shape.name() << " from " << shapes[i].name();
      EXPECT_EQ(loaded.wrong, 0u) << shape.name() << " from " << shapes[i].name();
      EXPECT_EQ(decoder.metric("pull_failures_total"), 0);
      // A chunk that was assembled from parts is a normal chunk: a third node, with the shape of the first, reads it
      // from here.
      ShapedNode third(controller.endpoint(), "third", shapes[i]);
      HandoffSource second{"tcp://" + decoder.scheduler->host() + ":" + std::to_string(decoder.scheduler->port()), "d",
                           21};
      const ShapedNode::Loaded again = third.load("t", prompt, second, 1);
      EXPECT_EQ(again.tokens, 20u) << shapes[i].name() << " from " << shape.name();
      EXPECT_EQ(again.wrong, 0u) << shapes[i].name() << " from " << shape.name();
    }
  }
}

TEST(Shapes, ReadFromEachOther) { check_all_pairs(shapes()); }

TEST(Shapes, OfALatentReadFromEachOther) {
  std::vector<NodeShape> latent = {{1, {4}}, {2, {4}}, {4, {1, 3}}, {2, {2, 2}}};
  for (NodeShape& shape : latent) {
    shape.heads = 1;
    shape.planes = 1;
  }
  check_all_pairs(latent);
}

class UnlikeNodes : public ::testing::Test {
 protected:
  TestController controller_;
  ShapedNode prefiller_{controller_.endpoint(), "prefill", {2, {4}}};
  ShapedNode decoder_{controller_.endpoint(), "decode", {1, {2, 2}}};
};

TEST_F(UnlikeNodes, ADamagedChunkIsNotLeasedAndDropped) {
  const HandoffSource source = prefiller_.prefill("p", tokens(21), 1);
  const double before = prefiller_.metric("pool_chunks");
  prefiller_.damage(1);
  // The first chunk is damaged, so nothing of the prompt can be loaded. The other chunks are pulled nevertheless.
  EXPECT_EQ(decoder_.load("d", tokens(21), source, 1).tokens, 0u);
  EXPECT_EQ(decoder_.metric("pulled_chunks_total"), 2);
  EXPECT_EQ(decoder_.metric("pull_failures_total"), 0);
  EXPECT_EQ(prefiller_.metric("pool_chunks"), before - 1);
}

TEST_F(UnlikeNodes, ADeadRankOfTheHolderCostsATimeoutNotARequest) {
  const HandoffSource source = prefiller_.prefill("p", tokens(21), 1);
  prefiller_.workers[1]->shutdown();
  prefiller_.workers[1].reset();
  EXPECT_EQ(decoder_.load("d", tokens(21), source, 1).tokens, 0u);
  EXPECT_EQ(decoder_.load("e", tokens(21), std::nullopt, 1).tokens, 0u);
}

TEST_F(UnlikeNodes, AModelOfOtherLayersIsRefusedWithBothSidesNumbers) {
  LeaseAnswer answer;
  answer.ranks = {{"", "", 64, {0, 4, 0, 2}}, {"", "", 64, {0, 4, 2, 2}}};
  const auto why = [&](std::vector<RankEndpoint> here) {
    const Result<ShardMap> map = fit_answer(here, answer);
    return map ? std::string() : map.error().what;
  };
  EXPECT_EQ(why({{"", "", 128, {0, 4, 0, 4}}}), "");
  EXPECT_EQ(why({{"", "", 128, {0, 8, 0, 4}}}),
            "the reading node's model has 8 layers of 4 KV heads, the holding node's has 4 layers of 4 KV heads; both "
            "must run the same model");
  EXPECT_EQ(
      why({{"", "", 256, {0, 4, 0, 4}}}),
      "the holder's chunk of 4 layers and 2 heads has 64 bytes, which does not fit this node's chunk of 4 layers and 4 "
      "heads, which has 256 bytes; both need the same number of bytes for each layer and head");
  answer.ranks = {{"", "", 64, {}}, {"", "", 64, {}}};
  EXPECT_NE(
      why({{"", "", 128, {0, 4, 0, 4}}}).find("version of kvferry serves only nodes with its own number of ranks"),
      std::string::npos);
  EXPECT_EQ(why({{"", "", 64, {0, 4, 0, 2}}, {"", "", 64, {0, 4, 2, 2}}}), "");
  // The ranks and bytes are equal, but there are stages, which that version does not have.
  EXPECT_EQ(
      why({{"", "", 64, {0, 2, 0, 4}}, {"", "", 64, {2, 2, 0, 4}}}),
      "this node has pipeline stages, which the holder's version of kvferry does not serve; upgrade kvferry there");
}

TEST_F(UnlikeNodes, WhatDiffersIsNamed) {
  LeaseAnswer answer;
  const auto why = [&](std::vector<RankEndpoint> here, std::vector<RankEndpoint> there) {
    answer.ranks = std::move(there);
    const Result<ShardMap> map = fit_answer(here, answer);
    return map ? std::string() : map.error().what;
  };
  const Shard half{0, 4, 0, 2}, other_half{0, 4, 2, 2};
  const std::string old =
      "; the holder's version of kvferry serves only nodes with its own number of ranks and its own chunk size";
  EXPECT_EQ(why({{"", "", 64, half}, {"", "", 64, other_half}}, {{"", "", 64, half}, {"", "", 32, other_half}}),
            "the chunks of rank 1 have 32 bytes at the holder and 64 here; both nodes need chunks of the same size");
  EXPECT_EQ(
      why({{"", "", 64, half}}, {{"", "", 32, {}}}),
      "the chunks of rank 0 have 32 bytes at the holder and 64 here; both nodes need chunks of the same size" + old);
  EXPECT_EQ(why({{"", "", 64, half}}, {{"", "", 64, {}}, {"", "", 64, {}}}),
            "the holder has 2 ranks and this node has 1; both need the same number of ranks" + old);
}

/// Two layers on one rank or on two: KV, and a state of 192 bytes with padding.
std::vector<RankEndpoint> ranks_with_parts(std::uint32_t num_ranks) {
  std::vector<RankEndpoint> ranks;
  for (std::uint32_t rank = 0; rank < num_ranks; ++rank) {
    const std::uint64_t kv = 256 / num_ranks, state = 192 / num_ranks;
    ranks.push_back({"", "", 2 * kv, shard_of(0, 2, 2, rank, num_ranks)});
    ranks.back().parts = {0, {0, 1}, {{{256, rank * kv, kv}}, {{192, rank * state, state}, {0, 0, kv - state}}}};
  }
  return ranks;
}

TEST(Shapes, WithStatesNeedTheRanksParts) {
  const std::vector<RankEndpoint> one = ranks_with_parts(1), two = ranks_with_parts(2);
  LeaseAnswer answer;
  const auto why = [&](const std::vector<RankEndpoint>& here, std::vector<RankEndpoint> there) {
    answer.ranks = std::move(there);
    const Result<ShardMap> map = fit_answer(here, answer);
    return map ? std::string() : map.error().what;
  };
  EXPECT_EQ(why(one, two), "");
  EXPECT_EQ(why(two, one), "");
  const auto changed = [&](auto change) {
    std::vector<RankEndpoint> ranks = two;
    change(ranks);
    return ranks;
  };
  const auto says_nothing = changed([](auto& ranks) { ranks[0].parts = ranks[1].parts = {}; });
  EXPECT_NE(why(one, says_nothing).find("does not say which parts of the layers' states its ranks have"),
            std::string::npos);
  EXPECT_NE(why(says_nothing, one).find("does not say which parts of the layers' states its ranks have"),
            std::string::npos);
  EXPECT_EQ(
      why(one, changed([](auto& ranks) { ranks[1].parts = {}; })),
      "a rank can't have 0 layers of 0 kinds from layer 0 on; allowed: 1 to 4096 layers of at most 1024 kinds from "
      "layer 0 to 4095 on");
  EXPECT_EQ(why(one, changed([](auto& ranks) { ranks[1].chunk_bytes = 250; })),
            "the parts of rank 1 have 256 bytes, but its chunks have 250; both must be equal");
  EXPECT_EQ(why(one, changed([](auto& ranks) { ranks.pop_back(); })),
            "no rank of the holding node has byte 128 of part 0 of layer 0 (counted from 0); together the ranks must "
            "have all of them");
}

TEST(Shapes, WithStatesAreReadByTheByte) {
  LeaseAnswer answer;
  answer.ranks = ranks_with_parts(2);
  const std::vector<RankEndpoint> here = ranks_with_parts(1);
  const ShardMap map = fit_answer(here, answer).value();
  ASSERT_EQ(map.size(), 1u);
  EXPECT_EQ(map[0], (std::vector<ShardRun>{{0, 0, 0, 128}, {1, 0, 128, 128}, {0, 128, 256, 96}, {1, 128, 352, 96}}));
  const PullOrder order = order_for(0, {}, here, answer.ranks, map, 0);
  EXPECT_EQ(order.num_cells, 512u);
  EXPECT_EQ(order.sources.size(), 2u);
}

/// RankEndpoint and LeaseRequest as they were before they had shapes.
struct OldEndpoint {
  std::string address, region;
  std::uint64_t chunk_bytes = 0;
  KVFERRY_FIELDS(address, region, chunk_bytes);
};
struct OldRequest {
  std::string fingerprint;
  std::vector<ChunkKey> keys;
  std::string handoff;
  KVFERRY_FIELDS(fingerprint, keys, handoff);
};

TEST(Shapes, OfANodeOfTheVersionBeforeAreNotTold) {
  const auto endpoint = decode<RankEndpoint>(encode(OldEndpoint{"a", "r", 64}), "endpoint");
  ASSERT_TRUE(endpoint) << endpoint.error().what;
  EXPECT_EQ(endpoint->chunk_bytes, 64u);
  EXPECT_EQ(endpoint->shard, Shard{});
  const auto request = decode<LeaseRequest>(encode(OldRequest{"toy", {}, "p"}), "request");
  ASSERT_TRUE(request) << request.error().what;
  EXPECT_TRUE(request->shards.empty());
  EXPECT_TRUE(decode<OldEndpoint>(encode(RankEndpoint{"a", "r", 64, {0, 4, 0, 2}}), "endpoint"));
  EXPECT_TRUE(decode<OldRequest>(encode(LeaseRequest{"toy", {}, "p", {{0, 4, 0, 2}}}), "request"));
}

TEST(RunChecksums, KeepAndWaitForNoMoreThanIsSane) {
  // Every reader of one head has a run for each layer, so each map has 262,144 runs.
  const std::vector<Shard> here = {{0, 512, 0, 512}};
  RunChecksums sums(here);
  LeaseRequest request{"toy", {}, "", {}};
  for (std::uint32_t head = 0; head < 512; ++head) request.shards.push_back({0, 512, head, 1});
  std::size_t most = 0;
  for (int shape = 0; shape < 10; ++shape) {
    ASSERT_TRUE(sums.check(request));
    most = std::max(most, sums.num_runs_kept());
    std::rotate(request.shards.begin(), request.shards.begin() + 1, request.shards.end());
  }
  EXPECT_EQ(most, 1u << 20);
  request.shards = {{0, 512, 0, 256}, {0, 512, 256, 256}};
  LeaseAnswer answer;
  answer.reply.chunks.push_back({0, {0, 1}, 8, {1}, 0, {}});
  request.keys.resize(1);
  for (int i = 0; i < 256; ++i) {
    ASSERT_TRUE(sums.check(request));
    sums.begin({"d", 1, 2}, request, answer, 0, 100);
  }
  EXPECT_FALSE(sums.check(request));
  sums.take_ready(100);
  EXPECT_TRUE(sums.check(request));
}

TEST(RunChecksums, HashNoChunkManyTimesForAReaderWhoseShardsOverlap) {
  const std::vector<Shard> here = {{0, 8, 0, 2}};
  RunChecksums sums(here);
  LeaseRequest request{"toy", {}, "", {}};
  // Equal parts count once, however many ranks have them, and so does a chunk that is read as a whole.
  for (int rank = 0; rank < 100; ++rank)
    for (const Shard& part : {Shard{0, 4, 0, 2}, Shard{4, 4, 0, 2}, Shard{0, 8, 0, 2}}) request.shards.push_back(part);
  EXPECT_TRUE(sums.check(request));
  for (std::uint32_t layer = 0; layer < 8; ++layer)
    for (std::uint32_t num = 1; layer + num <= 8; ++num) request.shards.push_back({layer, num, 0, 2});
  const Result<void> refused = sums.check(request);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kRefused);
  EXPECT_NE(refused.error().what.find("rank 0 of the holder would have to hash 224 cells"), std::string::npos)
      << refused.error().what;
  EXPECT_NE(refused.error().what.find("of a chunk of 16; at most 4 times"), std::string::npos) << refused.error().what;
}

TEST(RunChecksums, OfChunksWithStatesNeedTheReadersParts) {
  const std::vector<RankEndpoint> here = ranks_with_parts(2), reader = ranks_with_parts(1);
  RunChecksums sums(shards_of(here), parts_of(here));
  LeaseRequest request{"toy", {ChunkKey{}}, "", shards_of(reader)};
  ASSERT_TRUE(sums.is_needed(request));
  EXPECT_FALSE(sums.check(request));
  request.parts = {parts_of(reader)[0], parts_of(reader)[0]};
  EXPECT_FALSE(sums.check(request));
  request.parts = parts_of(reader);
  ASSERT_TRUE(sums.check(request));
  EXPECT_EQ(sums.num_runs_kept(), 4u + 2 + 3);  // with the layers and parts of the reader, which are kept too
  EXPECT_FALSE(RunChecksums(shards_of(here)).check(request));
  LeaseAnswer answer;
  answer.reply.chunks = {{0, {1, 7}, 8, {11, 12}, 0, {}}};
  const auto orders = sums.begin({"d", 1, 2}, request, answer, 0, 100);
  ASSERT_EQ(orders.size(), 2u);
  EXPECT_EQ(orders[1].order.num_cells, 256u);
  EXPECT_EQ(orders[1].order.runs, (std::vector<ShardRun>{{1, 0, 0, 128}, {1, 128, 0, 96}}));
}

TEST(RunChecksums, WaitForEveryRankAndLeaveOutWhatIsDamagedOrLate) {
  const std::vector<Shard> two = {{0, 2, 0, 1}, {0, 2, 1, 1}}, one = {{0, 2, 0, 2}},
                           staged = {{0, 1, 0, 2}, {1, 1, 0, 2}};
  RunChecksums sums(two);
  LeaseRequest request{"toy", std::vector<ChunkKey>(3), "", two};
  EXPECT_FALSE(sums.is_needed(request));
  request.shards = {};
  EXPECT_FALSE(sums.is_needed(request));  // a request of an older version has no shape
  request.shards = one;
  ASSERT_TRUE(sums.is_needed(request));
  ASSERT_TRUE(sums.check(request));
  for (std::uint8_t i = 0; i < 3; ++i) request.keys[i].bytes[0] = i;
  LeaseAnswer answer;
  answer.reply.lease = 7;
  for (std::uint32_t i = 0; i < 3; ++i) answer.reply.chunks.push_back({i, {i, 1}, 8, {10 + i, 20 + i}, 0, {}});
  const auto orders = sums.begin({"d", 5, 2}, request, answer, 0, 100);
  ASSERT_EQ(orders.size(), 2u);
  ASSERT_EQ(orders[1].order.runs.size(), 2u);  // there is one head of each layer
  ASSERT_EQ(orders[1].order.items.size(), 3u);
  EXPECT_EQ(orders[1].order.items[2].checksum, 22u);
  const std::uint64_t number = orders[0].order.order;
  sums.take({number, 0, 0, true, {100, 101}});
  sums.take({number, 1, 0, true, {200, 201}});
  sums.take({number, 0, 1, true, {110, 111}});
  sums.take({number, 1, 1, false, {}});    // damaged
  sums.take({number, 0, 2, true, {120}});  // nonsense
  sums.take({number, 7, 2, true, {120, 121}});
  sums.take({number, 0, 9, true, {120, 121}});
  EXPECT_TRUE(sums.take_ready(99).empty());
  const auto ready = sums.take_ready(100);
  ASSERT_EQ(ready.size(), 1u);
  EXPECT_EQ(ready[0].asker.sender, "d");
  EXPECT_EQ(ready[0].asker.id, 5u);
  EXPECT_EQ(ready[0].answer.reply.lease, 7u);
  ASSERT_EQ(ready[0].answer.reply.chunks.size(), 1u);
  EXPECT_EQ(ready[0].answer.reply.chunks[0].run_checksums,
            (std::vector<std::vector<std::uint64_t>>{{100, 200, 101, 201}}));
  ASSERT_EQ(ready[0].damaged.size(), 1u);
  EXPECT_EQ(ready[0].damaged[0].bytes[0], 1);
  EXPECT_EQ(ready[0].num_late, 1u);
  EXPECT_EQ(sums.num_waiting(), 0u);
  sums.take({number, 1, 2, true, {220, 221}});  // this outcome comes too late
  request.shards = {};
  EXPECT_TRUE(sums.check(request));
  EXPECT_FALSE(RunChecksums(staged).check(request));
  request.shards = one;
  // Whole chunks need no hashing, because one rank reads the chunks of two stages.
  RunChecksums of_stages(staged);
  ASSERT_TRUE(of_stages.check(request));
  EXPECT_TRUE(of_stages.begin({"d", 6, 2}, request, answer, 0, 100).empty());
  const auto at_once = of_stages.take_ready(0);
  ASSERT_EQ(at_once.size(), 1u);
  EXPECT_EQ(at_once[0].answer.reply.chunks.at(2).run_checksums, (std::vector<std::vector<std::uint64_t>>{{12, 22}}));
}

}  // namespace
}  // namespace kvferry
