// What a rank's chunks consist of: cells, in the order of the chunk. A cell is the KV of one layer, KV head and KV
// group or, of a rank that is described by parts, the KV of one head or one part of a state.
#pragma once

#include <cstdint>
#include <vector>

#include "connector/core/core_config.h"
#include "sim_text.h"
#include "transport/base/shard_map.h"

namespace kvferry::sim {

/// Returns by what the stamp at a place of a part of a layer's state differs from the stamp of the tokens before it. It
/// is the same on each rank that has this place.
Stamp state_mask(std::uint32_t layer, std::size_t part, std::uint64_t place);

struct Cell {
  std::uint32_t layer = 0;  // of the model
  std::size_t group = 0;
  std::size_t tensor = 0;   // the engine's memory; the layers of several KV groups share it, as in vLLM
  std::size_t offset = 0;   // place of the cell in a block of the tensor
  std::uint32_t size = 0;   // number of stamps of a part of a state; 0: one stamp of each token
  std::size_t part = 0;     // number of the part in its layer
  std::uint64_t first = 0;  // place of the first stamp in the part of all ranks together
  bool is_padding = false;
  Stamp token_mask = 0;

  bool is_part() const { return size > 0 || is_padding; }
  std::size_t num_stamps(std::uint32_t num_tokens) const { return is_part() ? size : num_tokens; }
  /// Returns by what the cell's stamp i differs from that of its token, or of the tokens before the state.
  Stamp mask(std::size_t i) const { return is_part() ? state_mask(layer, part, first + i) : token_mask; }
};

/// Returns the cells of a rank. parts: no layers: the shard says all, and each layer has something of each group;
/// otherwise group 0 has the layers that are one part, and group 1 those with a state.
std::vector<Cell> cells_of(const Shard& shard, const ShardParts& parts, const std::vector<KvGroup>& groups);

}  // namespace kvferry::sim
