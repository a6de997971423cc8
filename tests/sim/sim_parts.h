// A model in which every other layer has a state: which parts of each layer a rank has, and the lies that a node may
// tell about these. One stamp counts as one byte.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "sim_options.h"
#include "transport/base/shard_map.h"

namespace kvferry::sim {

constexpr bool has_state(std::uint32_t layer) { return layer % 2 == 1; }

/// Returns the parts of one rank's layers, in the order of the rank's chunk. A layer with attention is one part, of the
/// KV of all heads. A layer with a state has two rows of a convolution's window, the state's heads, and padding.
///
/// block_tokens: tokens of a chunk. is_on_all: every rank has all of B and C, as in Mamba-2 with one group of them;
/// otherwise ranks divide them.
ShardParts parts_of_rank(const Shard& shard, std::uint32_t num_heads, std::uint32_t rank, std::uint32_t tp_size,
                         std::uint32_t block_tokens, bool is_on_all);

/// A wrong account of a node's parts.
struct Lie {
  std::string what;
  bool must_be_refused = false;  // otherwise what is read because of it has other checksums
};
/// Changes the parts that a node tells, of all its ranks. is_holder: the other node knows the sizes of these ranks'
/// chunks. Returns nullopt if nothing was changed.
std::optional<Lie> lie_about(std::vector<ShardParts>& ranks, Dice& dice, bool is_holder);

}  // namespace kvferry::sim
