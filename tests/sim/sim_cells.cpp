#include "sim_cells.h"

#include <map>

namespace kvferry::sim {
namespace {

Stamp token_mask(std::size_t layer, std::size_t head, std::size_t group) {
  return ((layer * 64 + head) * 0x5555555555555555ULL) ^ (group * 0x3333333333333333ULL);
}

}  // namespace

Stamp state_mask(std::uint32_t layer, std::size_t part, std::uint64_t place) {
  return next_stamp(layer * 64 + part + 1, static_cast<std::int32_t>(place));
}

std::vector<Cell> cells_of(const Shard& shard, const ShardParts& parts, const std::vector<KvGroup>& groups) {
  std::vector<Cell> cells;
  std::size_t num_tensors = 0;
  for (std::uint32_t layer = shard.first_layer; parts.kinds.empty() && layer < shard.first_layer + shard.num_layers;
       ++layer)
    for (std::uint32_t head = shard.first_head; head < shard.first_head + shard.num_heads; ++head, ++num_tensors)
      for (std::size_t group = 0; group < groups.size(); ++group)
        cells.push_back(
            {.layer = layer, .group = group, .tensor = num_tensors, .token_mask = token_mask(layer, head, group)});
  std::map<std::size_t, std::size_t> num_layers;  // [group] layers so far
  for (std::uint32_t number = 0; number < parts.kinds.size(); ++number) {
    const std::uint32_t layer = parts.first_layer + number;
    const std::vector<LayerPart>& kind = parts.parts[parts.kinds[number]];
    const std::size_t group = kind.size() > 1 ? 1 : 0;
    const std::size_t tensor = num_layers[group]++;
    std::size_t offset = 0;
    if (group == 0)
      for (std::uint32_t head = shard.first_head; head < shard.first_head + shard.num_heads; ++head)
        cells.push_back({.layer = layer,
                         .group = group,
                         .tensor = tensor,
                         .offset = groups[0].block_tokens * (head - shard.first_head),
                         .token_mask = token_mask(layer, head, group)});
    for (std::size_t part = 0; group == 1 && part < kind.size(); ++part) {
      const auto size = static_cast<std::uint32_t>(kind[part].bytes);
      cells.push_back({.layer = layer,
                       .group = group,
                       .tensor = tensor,
                       .offset = offset,
                       .size = size,
                       .part = part,
                       .first = kind[part].first,
                       .is_padding = kind[part].whole == 0});
      offset += size;
    }
  }
  return cells;
}

}  // namespace kvferry::sim
