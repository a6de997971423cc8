// Tests all pairs of small shapes: every byte of every reader's chunk comes exactly once, and from the right place.
#include "transport/base/shard_map.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <limits>
#include <random>

namespace kvferry {
namespace {

constexpr std::uint32_t kDim = 2;

struct Shape {
  std::string name;
  std::vector<Shard> ranks;
};

/// Returns all ways to divide `layers` into stages, including uneven ones, with all tensor parallel sizes that vLLM
/// allows.
std::vector<Shape> all_shapes(std::uint32_t layers, std::uint32_t heads) {
  std::vector<Shape> shapes;
  for (std::uint32_t cuts = 0; cuts < 1u << (layers - 1); ++cuts) {
    for (std::uint32_t tp = 1; tp <= 8; ++tp) {
      if (heads % tp != 0 && tp % heads != 0) continue;
      Shape shape{"tp " + std::to_string(tp) + " stages", {}};
      for (std::uint32_t first = 0, end = 1; first < layers; first = end++) {
        while (end < layers && (cuts >> (end - 1) & 1) == 0) ++end;
        for (std::uint32_t rank = 0; rank < tp; ++rank)
          shape.ranks.push_back(shard_of(first, end - first, heads, rank, tp));
        shape.name += " " + std::to_string(end - first);
      }
      shapes.push_back(std::move(shape));
    }
  }
  return shapes;
}

/// Returns a chunk of `tokens` tokens in the order of canonical chunk bytes (kernels/kv_layout.h): [layer][kv_head][k
/// or v][token][head_dim].
std::vector<std::uint32_t> chunk_of(const Shard& shard, std::uint32_t planes, std::uint32_t tokens) {
  std::vector<std::uint32_t> bytes;
  for (std::uint32_t layer = 0; layer < shard.num_layers; ++layer)
    for (std::uint32_t head = 0; head < shard.num_heads; ++head)
      for (std::uint32_t plane = 0; plane < planes; ++plane)
        for (std::uint32_t token = 0; token < tokens; ++token)
          for (std::uint32_t dim = 0; dim < kDim; ++dim)
            bytes.push_back(
                ((((shard.first_layer + layer) * 8 + shard.first_head + head) * 2 + plane) * 4 + token) * 2 + dim);
  return bytes;
}

/// Returns the smallest number of runs from which the reader's chunk can be assembled. Tries all possibilities.
std::size_t fewest_runs(const Shard& reader, const std::vector<Shard>& holders) {
  const auto position = [&](const Shard& holder, std::uint64_t cell) -> std::int64_t {
    const auto layer = static_cast<std::uint32_t>(reader.first_layer + cell / reader.num_heads);
    const auto head = static_cast<std::uint32_t>(reader.first_head + cell % reader.num_heads);
    if (!holder.has(layer, head)) return -10;
    return std::int64_t{layer - holder.first_layer} * holder.num_heads + (head - holder.first_head);
  };
  std::vector<std::size_t> fewest(reader.num_cells() + 1, std::numeric_limits<std::size_t>::max() / 2);
  fewest[reader.num_cells()] = 0;
  for (std::uint64_t cell = reader.num_cells(); cell-- > 0;) {
    for (const Shard& holder : holders) {
      std::uint64_t end = cell;
      while (end < reader.num_cells() && position(holder, end) >= 0 &&
             position(holder, end) == position(holder, cell) + static_cast<std::int64_t>(end - cell)) {
        ++end;
        fewest[cell] = std::min(fewest[cell], 1 + fewest[end]);
      }
    }
  }
  return fewest[0];
}

void check_pair(const std::vector<Shard>& readers, const std::vector<Shard>& holders, const std::string& what) {
  const auto map = map_shards(readers, holders);
  ASSERT_TRUE(map) << what << ": " << map.error().what;
  ASSERT_EQ(map->size(), readers.size());
  for (std::size_t rank = 0; rank < readers.size(); ++rank)
    ASSERT_EQ((*map)[rank].size(), fewest_runs(readers[rank], holders)) << what << ", rank " << rank;
  for (const std::uint32_t planes : {1u, 2u}) {
    for (std::uint32_t tokens = 1; tokens <= 3; ++tokens) {
      const std::size_t cell = std::size_t{planes} * tokens * kDim;
      std::vector<std::vector<std::uint32_t>> sources;
      for (const Shard& holder : holders) sources.push_back(chunk_of(holder, planes, tokens));
      for (std::size_t rank = 0; rank < readers.size(); ++rank) {
        const std::vector<std::uint32_t> wanted = chunk_of(readers[rank], planes, tokens);
        std::vector<std::uint32_t> got(wanted.size(), 0), writes(wanted.size(), 0);
        for (const ShardRun& run : (*map)[rank]) {
          ASSERT_LE((run.target + run.cells) * cell, got.size()) << what;
          ASSERT_LE((run.source + run.cells) * cell, sources.at(run.holder).size()) << what;
          for (std::size_t i = 0; i < run.cells * cell; ++i) {
            got[run.target * cell + i] = sources[run.holder][run.source * cell + i];
            writes[run.target * cell + i] += 1;
          }
        }
        ASSERT_EQ(got, wanted) << what << ", rank " << rank;
        ASSERT_EQ(std::count(writes.begin(), writes.end(), 1u), static_cast<std::ptrdiff_t>(writes.size())) << what;
      }
    }
  }
}

TEST(ShardMap, EveryShapeReadsFromEveryOther) {
  std::size_t num_pairs = 0;
  for (std::uint32_t layers = 1; layers <= 4; ++layers) {
    for (std::uint32_t heads = 1; heads <= 4; ++heads) {
      const std::vector<Shape> shapes = all_shapes(layers, heads);
      for (const Shape& reader : shapes) {
        for (const Shape& holder : shapes) {
          check_pair(reader.ranks, holder.ranks, reader.name + " from " + holder.name);
          if (HasFatalFailure()) return;
          ++num_pairs;
        }
      }
    }
  }
  EXPECT_GT(num_pairs, 5000u);
}

TEST(ShardMap, RectanglesOfAnyKindReadFromEachOther) {
  std::mt19937 rng(7);
  const auto below = [&](std::uint32_t end) { return static_cast<std::uint32_t>(rng() % end); };
  for (int round = 0; round < 2000; ++round) {
    const std::uint32_t layers = 1 + below(5), heads = 1 + below(5);
    const auto draw = [&] {
      std::vector<Shard> ranks;
      while (ranks.size() < 12) {
        const std::uint32_t layer = below(layers), head = below(heads);
        ranks.push_back({layer, 1 + below(layers - layer), head, 1 + below(heads - head)});
      }
      ranks.push_back({0, layers, 0, 1});  // this rank and the next two cover all layers and heads
      ranks.push_back({0, layers, heads - 1, 1});
      if (heads > 2) ranks.push_back({0, layers, 1, heads - 2});
      std::shuffle(ranks.begin(), ranks.end(), rng);
      return ranks;
    };
    check_pair(draw(), draw(), "round " + std::to_string(round));
    if (HasFatalFailure()) return;
  }
}

TEST(ShardMap, TheSameShapeIsOneRunOfOnesOwnNumber) {
  for (const std::uint32_t heads : {1u, 2u, 4u}) {
    for (const Shape& shape : all_shapes(4, heads)) {
      const auto map = map_shards(shape.ranks, shape.ranks).value();
      for (std::uint32_t rank = 0; rank < shape.ranks.size(); ++rank) {
        ASSERT_EQ(map[rank], (std::vector<ShardRun>{{rank, 0, 0, shape.ranks[rank].num_cells()}})) << shape.name;
      }
    }
  }
}

TEST(ShardMap, ReadersSpreadOverReplicas) {
  for (std::uint32_t readers = 1; readers <= 8; ++readers) {
    for (std::uint32_t holders = 1; holders <= 8; ++holders) {
      const std::vector<Shard> latent{{0, 4, 0, 1}};
      std::vector<Shard> all_readers(readers, latent[0]), all_holders(holders, latent[0]);
      std::vector<std::uint32_t> load(holders, 0);
      const auto map = map_shards(all_readers, all_holders).value();
      for (const auto& runs : map) load.at(runs.at(0).holder) += 1;
      const auto [least, most] = std::minmax_element(load.begin(), load.end());
      EXPECT_LE(*most - *least, 1u) << readers << " from " << holders;
    }
  }
  // Two heads, each on four ranks, are read by four ranks: two of them read ranks 0 and 1 for the first head, the
  // others ranks 4 and 5 for the second head.
  std::vector<Shard> eight, four;
  for (std::uint32_t rank = 0; rank < 8; ++rank) eight.push_back(shard_of(0, 1, 2, rank, 8));
  for (std::uint32_t rank = 0; rank < 4; ++rank) four.push_back(shard_of(0, 1, 2, rank, 4));
  std::vector<std::uint32_t> sources;
  const ShardMap map = map_shards(four, eight).value();
  for (const auto& runs : map) sources.push_back(runs.at(0).holder);
  EXPECT_EQ(sources, (std::vector<std::uint32_t>{0, 1, 4, 5}));
}

TEST(ShardMap, WhatCantBeRightIsRefused) {
  const std::vector<Shard> good{{0, 4, 0, 2}, {0, 4, 2, 2}};
  EXPECT_NE(map_shards(good, std::vector<Shard>{{0, 4, 0, 2}}).error().what.find("heads"), std::string::npos);
  const auto refusal = [&](std::vector<Shard> shards) {
    const auto map = map_shards(good, shards);
    return map ? std::string() : map.error().what;
  };
  EXPECT_EQ(
      refusal({{0, 2, 0, 4}, {3, 1, 0, 4}}),
      "no rank of the node has layer 2, head 0 (counted from 0); together the ranks must have all layers and heads");
  EXPECT_EQ(refusal({{0, 3, 0, 4}}),
            "the reading node's model has 4 layers of 4 KV heads, the holding node's has 3 layers of 4 KV heads; both "
            "must run the same model");
  EXPECT_EQ(refusal({}), "a node can't have 0 ranks; 1 to 4096 are allowed");
  EXPECT_NE(refusal({{0, 4, 0, 4}, {0, 0, 0, 4}}), "");
  EXPECT_NE(refusal({{0, 4, 0, 4}, {0, 4, 0, 0}}), "");
  EXPECT_NE(refusal({{0xffffffff, 4, 0, 4}}), "");
  EXPECT_NE(refusal({{0, 0xffffffff, 0, 0xffffffff}}), "");
  EXPECT_NE(refusal(std::vector<Shard>(5000, {0, 4, 0, 4})), "");
  EXPECT_EQ(refusal({{0, 4, 0, 4}, {1, 1, 1, 1}}), "");
}

}  // namespace
}  // namespace kvferry
