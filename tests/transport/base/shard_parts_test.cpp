// Tests how nodes of unlike shapes read chunks with states from each other, byte by byte, and what is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "transport/base/shard_map.h"

namespace kvferry {
namespace {

using ::testing::HasSubstr;

constexpr std::uint64_t kPadding = ~std::uint64_t{0};

/// How the tensor parallel ranks of a node divide a part: equally, or each has all of it.
struct Share {
  std::uint64_t whole = 0;
  bool is_on_all = false;
};
using Kind = std::vector<Share>;
// A short convolution; a convolution of two rows with x, B and C, of which B and C are on all ranks, and a state; KV; a
// state without padding on eight ranks.
const std::vector<Kind> kKinds = {
    {{24}, {24}}, {{16}, {3, true}, {3, true}, {16}, {3, true}, {3, true}, {64}}, {{256}}, {{64}, {24, true}}};

ShardParts rank_of(std::uint32_t first, std::uint32_t num, std::uint32_t tp_rank, std::uint32_t tp_size) {
  ShardParts made{first, {}, {}};
  for (const Kind& kind : kKinds) {
    std::vector<LayerPart>& parts = made.parts.emplace_back();
    std::uint64_t padding = 256 / tp_size;
    for (const Share& share : kind) {
      const std::uint64_t own = share.is_on_all ? share.whole : share.whole / tp_size;
      parts.push_back({share.whole, share.is_on_all ? 0 : tp_rank * own, own});
      padding -= own;
    }
    parts.push_back({0, 0, padding});  // 0 bytes where there is none
  }
  for (std::uint32_t layer = first; layer < first + num; ++layer) made.kinds.push_back(layer % 4);
  return made;
}

std::vector<ShardParts> node_of(const std::vector<std::uint32_t>& stages, std::uint32_t tp_size) {
  std::vector<ShardParts> ranks;
  std::uint32_t first = 0;
  for (const std::uint32_t layers : stages) {
    for (std::uint32_t rank = 0; rank < tp_size; ++rank) ranks.push_back(rank_of(first, layers, rank, tp_size));
    first += layers;
  }
  return ranks;
}

/// Returns a chunk whose bytes tell their place in the whole model. Padding is `padding`.
std::vector<std::uint64_t> chunk_of(const ShardParts& rank, std::uint64_t padding) {
  std::vector<std::uint64_t> bytes;
  for (std::size_t layer = 0; layer < rank.kinds.size(); ++layer) {
    const std::vector<LayerPart>& parts = rank.parts[rank.kinds[layer]];
    for (std::size_t part = 0; part < parts.size(); ++part)
      for (std::uint64_t i = 0; i < parts[part].bytes; ++i)
        bytes.push_back(parts[part].whole == 0
                            ? padding
                            : ((rank.first_layer + layer) * 100 + part) * 1000 + parts[part].first + i);
  }
  return bytes;
}

TEST(ShardParts, OfEveryShapeReadFromEveryOther) {
  const std::vector<std::vector<std::uint32_t>> all_stages = {{5}, {2, 3}, {1, 1, 3}};
  for (const auto& ours : all_stages)
    for (const std::uint32_t our_size : {1u, 2u, 4u, 8u})
      for (const auto& theirs : all_stages)
        for (const std::uint32_t their_size : {1u, 2u, 4u, 8u}) {
          const std::vector<ShardParts> readers = node_of(ours, our_size), holders = node_of(theirs, their_size);
          const Result<ShardMap> map = map_parts(readers, holders);
          ASSERT_TRUE(map) << map.error().what;
          for (std::size_t reader = 0; reader < readers.size(); ++reader) {
            const std::vector<std::uint64_t> wanted = chunk_of(readers[reader], kPadding);
            ASSERT_EQ(readers[reader].num_bytes(), wanted.size());
            std::vector<std::uint64_t> got(wanted.size(), kPadding);
            std::uint64_t end = 0;
            for (const ShardRun& run : (*map)[reader]) {
              ASSERT_GE(run.target, end);  // in order, and no byte is read twice
              end = run.target + run.cells;
              const std::vector<std::uint64_t> source = chunk_of(holders.at(run.holder), 1);
              ASSERT_LE(end, got.size());
              ASSERT_LE(run.source + run.cells, source.size());
              std::copy_n(source.begin() + static_cast<std::ptrdiff_t>(run.source), run.cells,
                          got.begin() + static_cast<std::ptrdiff_t>(run.target));
            }
            ASSERT_EQ(got, wanted) << "rank " << reader << " of tp " << our_size << " from tp " << their_size;
          }
        }
}

TEST(ShardParts, AreReadInFewRuns) {
  const auto num_runs = [](std::uint32_t ours, std::uint32_t theirs) {
    const ShardMap map = map_parts(node_of({2}, ours), node_of({2}, theirs)).value();
    std::vector<std::size_t> runs;
    for (const auto& rank : map) runs.push_back(rank.size());
    return runs;
  };
  // Layer 0 has two rows, each from both ranks. In layer 1, B and C come from one rank, in one run with what follows.
  EXPECT_EQ(num_runs(1, 2), (std::vector<std::size_t>{4 + 6}));
  EXPECT_EQ(num_runs(1, 1), (std::vector<std::size_t>{2}));  // the runs leave out the padding
  EXPECT_EQ(num_runs(2, 1), (std::vector<std::size_t>{2 + 3, 2 + 3}));
}

TEST(ShardParts, ThatDoNotFitAreRefused) {
  const auto why = [](const std::vector<ShardParts>& readers, const std::vector<ShardParts>& holders) {
    const Result<ShardMap> map = map_parts(readers, holders);
    return map ? std::string() : map.error().what;
  };
  const std::vector<ShardParts> one = node_of({4}, 1), two = node_of({4}, 2);
  EXPECT_EQ(why(one, two), "");
  EXPECT_THAT(why(one, node_of({5}, 2)), HasSubstr("model has 4 layers, the holding node's has 5"));
  EXPECT_THAT(why(one, {two[0]}), HasSubstr("no rank of the holding node has byte 12 of part 0 of layer 0"));
  std::vector<ShardParts> bad = one;
  bad[0].parts[1][0].whole = 32;
  EXPECT_THAT(why(bad, two), HasSubstr("the reading node's layer 1 (counted from 0) has 8 parts of 124 bytes"));
  bad = two;
  bad[1].parts[1][0].whole = 32;
  EXPECT_THAT(why(one, bad), HasSubstr("do not agree on the parts of layer 1"));
  const auto with = [&](auto change) {
    std::vector<ShardParts> changed = one;
    change(changed[0]);
    return changed;
  };
  EXPECT_THAT(why(one, {}), HasSubstr("can't have 0 ranks"));
  EXPECT_THAT(why(with([](auto& rank) { rank.kinds.clear(); }), two), HasSubstr("can't have 0 layers"));
  EXPECT_THAT(why(with([](auto& rank) { rank.first_layer = 1u << 31; }), two), HasSubstr("from layer 2147483648 on"));
  EXPECT_THAT(why(with([](auto& rank) { rank.kinds[0] = 4; }), two), HasSubstr("a layer of kind 4, but describes 4"));
  EXPECT_THAT(why(with([](auto& rank) { rank.parts[0].clear(); }), two), HasSubstr("can't have 0 parts"));
  EXPECT_THAT(why(with([](auto& rank) { rank.parts.resize(2000); }), two), HasSubstr("of 2000 kinds"));
  for (const LayerPart& part : {LayerPart{24, 0, 0}, LayerPart{24, 0, 25}, LayerPart{24, ~std::uint64_t{0}, 2},
                                LayerPart{~std::uint64_t{0}, 0, 1}, LayerPart{0, 0, ~std::uint64_t{0}}})
    EXPECT_THAT(why(with([&](auto& rank) { rank.parts[0][0] = part; }), two), HasSubstr("allowed: at least 1 byte"));
  EXPECT_THAT(why(with([](auto& rank) {
                    rank.parts[0].resize(1000, {24, 0, 24}), rank.kinds.assign(4000, 0);
                  }),
                  two),
              HasSubstr("parts; at most 1048576 are allowed"));
  const std::vector<ShardParts> five = node_of({5}, 1);
  EXPECT_THAT(why(five, std::vector<ShardParts>(4096, five[0])), HasSubstr("use fewer ranks"));
}

}  // namespace
}  // namespace kvferry
