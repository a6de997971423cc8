#include "sim_parts.h"

#include <algorithm>
#include <utility>

namespace kvferry::sim {
namespace {

constexpr std::uint32_t kRows = 2;      // rows of the convolution's window
constexpr std::uint32_t kChannels = 4;  // of x, on all ranks together; also the number of the state's heads
constexpr std::uint32_t kPair = 4;      // channels of B, and of C
constexpr std::uint32_t kPerHead = 2;   // stamps of one head of the state

}  // namespace

ShardParts parts_of_rank(const Shard& shard, std::uint32_t num_heads, std::uint32_t rank, std::uint32_t tp_size,
                         std::uint32_t block_tokens, bool is_on_all) {
  const LayerPart attention{std::uint64_t{num_heads} * block_tokens, std::uint64_t{shard.first_head} * block_tokens,
                            std::uint64_t{shard.num_heads} * block_tokens};
  std::vector<LayerPart> state;
  const auto add = [&](std::uint32_t whole, bool is_whole) {
    const std::uint32_t own = is_whole ? whole : whole / tp_size;
    state.push_back({whole, is_whole ? 0 : rank * own, own});
  };
  for (std::uint32_t row = 0; row < kRows; ++row) {
    add(kChannels, false);
    add(kPair, is_on_all);
    add(kPair, is_on_all);
  }
  add(kChannels * kPerHead, false);
  state.push_back({0, 0, tp_size - 1});  // padding, of which nodes of unlike sizes have unlike amounts
  ShardParts parts{shard.first_layer, {}, {{attention}, std::move(state)}};
  for (std::uint32_t layer = 0; layer < shard.num_layers; ++layer)
    parts.kinds.push_back(has_state(shard.first_layer + layer) ? 1 : 0);
  return parts;
}

std::optional<Lie> lie_about(std::vector<ShardParts>& ranks, Dice& dice, bool is_holder) {
  std::vector<ShardParts> told = ranks;
  ShardParts& one = told[dice.between(0, static_cast<std::uint32_t>(told.size()) - 1)];
  constexpr std::size_t kB = 1, kHeads = std::size_t{kRows} * 3;  // indexes of parts
  const bool is_pair_on_all = one.parts[1][kB].bytes == one.parts[1][kB].whole;
  Lie lie;
  switch (dice.between(0, 9)) {
    case 0:
      lie = {"tells no parts", true};
      told.assign(told.size(), {});
      break;
    case 1:
      lie = {"tells no parts of one rank", true};
      if (is_holder)
        one = {};
      else
        told.pop_back();
      break;
    case 2:
    case 3:
      lie = {"tells a part of another size", true};
      for (ShardParts& rank : told) {
        LayerPart &part = rank.parts[1][is_pair_on_all ? kB : kHeads], &padding = rank.parts[1].back();
        const std::uint64_t own = is_holder ? part.bytes + 1 : part.bytes - 1;  // no byte that is wanted is missing
        part = {part.whole / part.bytes * own, part.first / part.bytes * own, own};
        if (is_holder && padding.bytes > 0) padding.bytes -= 1;  // the chunk is as long as before
      }
      break;
    case 4:
    case 9: {
      lie = {"tells fewer bytes than a rank has", is_holder};
      LayerPart& part = one.parts[1][is_pair_on_all ? kB : kHeads];
      if (part.bytes < 2 || std::ranges::count(one.kinds, 1u) == 0) return std::nullopt;
      part.bytes -= 1;
      break;
    }
    case 5:
      lie = {"tells bytes outside of a part", true};
      one.parts[1][kHeads].first += one.parts[1][kHeads].whole;
      break;
    case 6:
    case 7:
      lie = {"tells bytes beside those that a rank has", false};
      if (one.parts[1][kHeads].first > 0) one.parts[1][kHeads].first -= 1;
      break;
    default:
      lie = {"tells each rank's parts of the next one", false};
      std::rotate(told.begin(), told.begin() + 1, told.end());
  }
  if (told == ranks) return std::nullopt;
  ranks = std::move(told);
  return lie;
}

}  // namespace kvferry::sim
