// Tests what the simulator knows of states between nodes of unlike shapes: its parts fit together, its lies are such,
// and whatever lies in a wrong place of a chunk is found.
#include "sim_parts.h"

#include <gtest/gtest.h>

#include "sim_worker.h"

namespace kvferry::sim {
namespace {

constexpr std::uint32_t kTokens = 4, kLayers = 3, kHeads = 2;

std::vector<ShardParts> node_of(std::uint32_t tp_size, bool is_on_all) {
  std::vector<ShardParts> ranks;
  for (std::uint32_t rank = 0; rank < tp_size; ++rank)
    ranks.push_back(
        parts_of_rank(shard_of(0, kLayers, kHeads, rank, tp_size), kHeads, rank, tp_size, kTokens, is_on_all));
  return ranks;
}

TEST(Parts, NodesOfAllSizesReadFromEachOther) {
  for (const bool is_on_all : {false, true})
    for (const std::uint32_t readers : {1u, 2u, 4u})
      for (const std::uint32_t holders : {1u, 2u, 4u})
        EXPECT_TRUE(bool(map_parts(node_of(readers, is_on_all), node_of(holders, is_on_all))));
  EXPECT_NE(node_of(1, true)[0].num_bytes(), node_of(2, true)[0].num_bytes());
}

TEST(Parts, EachLieChangesSomethingAndBothKindsAreTold) {
  Dice dice(1);
  for (const bool is_holder : {false, true}) {
    std::uint32_t refused = 0, undetected = 0;
    for (std::uint32_t i = 0; i < 200; ++i) {
      std::vector<ShardParts> told = node_of(2, i % 2 == 0);
      const std::optional<Lie> lie = lie_about(told, dice, is_holder);
      EXPECT_EQ(lie.has_value(), told != node_of(2, i % 2 == 0));
      refused += lie && lie->must_be_refused;
      undetected += lie && !lie->must_be_refused;
    }
    EXPECT_GT(refused, 20u);
    EXPECT_GT(undetected, 20u);
  }
}

/// A rank of a node of two, with a chunk in slot 0.
class PutTogether : public ::testing::Test {
 protected:
  PutTogether() {
    for (const Cell& cell : cells_)
      for (std::size_t i = 0; i < cell.num_stamps(kTokens); ++i)
        bytes_.push_back(cell.is_padding ? 0 : plain_[cell.is_part() ? kTokens - 1 : i] ^ cell.mask(i));
  }
  std::optional<std::string> find_wrong() {
    worker_.write_pushed({0, ++generation_}, bytes_);
    return worker_.find_wrong(0, plain_);
  }
  /// Returns where the cells of the layer with a state begin.
  std::size_t state_begin() const { return std::size_t{cells_[0].num_stamps(kTokens)}; }

  const Shard shard_ = shard_of(0, kLayers, kHeads, 1, 2);
  const ShardParts parts_ = node_of(2, true)[1];
  const std::vector<KvGroup> groups_ = {{kTokens}, {kTokens, kState}};
  const std::vector<Cell> cells_ = cells_of(shard_, parts_, groups_);
  const std::vector<Stamp> plain_ = {11, 12, 13, 14};
  Worker worker_{1, shard_, 2, 1, 1, groups_, parts_};
  std::vector<Stamp> bytes_;
  std::uint64_t generation_ = 0;
};

TEST_F(PutTogether, AChunkOfItsTokensIsRight) {
  EXPECT_EQ(bytes_.size(), parts_.num_bytes());
  EXPECT_EQ(find_wrong(), std::nullopt);
  EXPECT_EQ(worker_.plain(0), plain_);
}

TEST_F(PutTogether, PaddingIsNobodys) {
  std::size_t at = 0;
  for (const Cell& cell : cells_) {
    for (std::size_t i = 0; cell.is_padding && i < cell.size; ++i) bytes_[at + i] = 99;
    at += cell.num_stamps(kTokens);
  }
  EXPECT_EQ(find_wrong(), std::nullopt);
}

TEST_F(PutTogether, OneStampInAnotherPlaceIsFound) {
  for (std::size_t i = 0; i + 1 < bytes_.size(); ++i) {
    std::swap(bytes_[i], bytes_[i + 1]);
    EXPECT_TRUE(find_wrong().has_value()) << i;
    std::swap(bytes_[i], bytes_[i + 1]);
  }
}

TEST_F(PutTogether, AStateOfOtherTokensIsFound) {
  for (std::size_t i = 0; i < bytes_.size(); ++i) bytes_[i] ^= i == state_begin() ? 14 ^ 13 : 0;
  EXPECT_EQ(find_wrong(), "byte 2 of part 0 of layer 1");
}

TEST_F(PutTogether, AStateIsLeftOutAsAWholeOrNotAtAll) {
  bytes_[state_begin()] = 0;
  EXPECT_TRUE(find_wrong().has_value());
  std::size_t at = 0;
  for (const Cell& cell : cells_) {
    for (std::size_t i = 0; cell.is_part() && i < cell.size; ++i) bytes_[at + i] = 0;
    at += cell.num_stamps(kTokens);
  }
  EXPECT_EQ(find_wrong(), std::nullopt);
}

TEST_F(PutTogether, AChunkOfAnotherSizeIsFound) {
  bytes_.pop_back();
  EXPECT_EQ(find_wrong(), "the chunk's size");
}

}  // namespace
}  // namespace kvferry::sim
