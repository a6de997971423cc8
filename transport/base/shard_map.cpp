#include "transport/base/shard_map.h"

#include <algorithm>
#include <map>
#include <set>

namespace kvferry {
namespace {

// Limits on the work that a peer's message can cause; no real model exceeds them.
constexpr std::uint32_t kMaxLayers = 4096, kMaxHeads = 4096;
constexpr std::size_t kMaxRanks = 4096;
constexpr std::uint64_t kMaxCells = 1ULL << 20;  // limit on the model's cells, and on the sum over a node's ranks
constexpr std::uint64_t kMaxWork = 1ULL << 28;   // limit on (number of readers' cells) * (number of holders)

struct Size {
  std::uint32_t layers = 0, heads = 0;
  bool operator==(const Size&) const = default;
};

Size whole_of(std::span<const Shard> shards) {
  Size size;
  for (const Shard& shard : shards) {
    size.layers = std::max(size.layers, shard.first_layer + shard.num_layers);
    size.heads = std::max(size.heads, shard.first_head + shard.num_heads);
  }
  return size;
}

std::uint64_t cell_of(const Shard& shard, std::uint32_t layer, std::uint32_t head) {
  return std::uint64_t{layer - shard.first_layer} * shard.num_heads + (head - shard.first_head);
}

/// Returns how many cells, from (`layer`, `head`) on, are consecutive in both the reader's and the holder's chunk.
std::uint64_t run_length(const Shard& reader, const Shard& holder, std::uint32_t layer, std::uint32_t head) {
  const std::uint32_t reader_end = reader.first_head + reader.num_heads;
  const std::uint32_t holder_end = holder.first_head + holder.num_heads;
  const std::uint32_t in_layer = std::min(reader_end, holder_end) - head;
  // A run extends into the next layer only if both chunks continue with the same head there.
  if (reader_end != holder_end || reader.first_head != holder.first_head) return in_layer;
  const std::uint32_t end =
      std::min(reader.first_layer + reader.num_layers, holder.first_layer + holder.num_layers) - 1;
  return in_layer + std::uint64_t{end - layer} * reader.num_heads;
}

/// Returns the runs that fill the reader's chunk. `turn` selects among holders with equally long runs.
std::vector<ShardRun> runs_of(const Shard& reader, std::size_t turn, std::span<const Shard> holders) {
  std::vector<ShardRun> runs;
  for (std::uint64_t cell = 0; cell < reader.num_cells(); cell += runs.back().cells) {
    const auto layer = static_cast<std::uint32_t>(reader.first_layer + cell / reader.num_heads);
    const auto head = static_cast<std::uint32_t>(reader.first_head + cell % reader.num_heads);
    // Takes the holder with the longest run; this greedy choice gives the fewest runs.
    std::uint64_t longest = 0;
    std::vector<std::uint32_t> best;
    for (std::uint32_t rank = 0; rank < holders.size(); ++rank) {
      if (!holders[rank].has(layer, head)) continue;
      const std::uint64_t length = run_length(reader, holders[rank], layer, head);
      if (length > longest) best.clear();
      longest = std::max(longest, length);
      if (length == longest) best.push_back(rank);
    }
    const std::uint32_t holder = best[turn % best.size()];
    runs.push_back({holder, cell_of(holders[holder], layer, head), cell, longest});
  }
  return runs;
}

}  // namespace

Result<void> check_shards(std::span<const Shard> shards) {
  const auto bad = [](std::string what) { return Error{ErrorCode::kInvalidArgument, std::move(what)}; };
  if (shards.empty() || shards.size() > kMaxRanks)
    return bad(fmt::format("a node can't have {} ranks; 1 to 4096 are allowed", shards.size()));
  for (const Shard& shard : shards) {
    const bool is_sane = shard.num_layers > 0 && shard.num_heads > 0 && shard.first_layer < kMaxLayers &&
                         shard.num_layers <= kMaxLayers && shard.first_head < kMaxHeads && shard.num_heads <= kMaxHeads;
    if (!is_sane)
      return bad(fmt::format(
          "a rank can't have {} layers from layer {} on and {} heads from head {} on; allowed: 1 to {} layers "
          "from layer 0 to {} on, and 1 to {} heads from head 0 to {} on",
          shard.num_layers, shard.first_layer, shard.num_heads, shard.first_head, kMaxLayers, kMaxLayers - 1, kMaxHeads,
          kMaxHeads - 1));
  }
  const Size size = whole_of(shards);
  std::uint64_t num_cells = 0;
  for (const Shard& shard : shards) num_cells += shard.num_cells();
  num_cells = std::max(num_cells, std::uint64_t{size.layers} * size.heads);
  if (num_cells > kMaxCells)
    return bad(
        fmt::format("{} ranks of a model with {} layers and {} heads have {} combinations of a layer and a head; "
                    "at most {} are allowed",
                    shards.size(), size.layers, size.heads, num_cells, kMaxCells));
  std::vector<bool> is_there(std::size_t{size.layers} * size.heads, false);
  for (const Shard& shard : std::set<Shard>(shards.begin(), shards.end()))
    for (std::uint32_t layer = shard.first_layer; layer < shard.first_layer + shard.num_layers; ++layer)
      for (std::uint32_t head = shard.first_head; head < shard.first_head + shard.num_heads; ++head)
        is_there[std::size_t{layer} * size.heads + head] = true;
  const auto missing = std::find(is_there.begin(), is_there.end(), false);
  if (missing == is_there.end()) return {};
  const auto cell = static_cast<std::size_t>(missing - is_there.begin());
  return bad(fmt::format(
      "no rank of the node has layer {}, head {} (counted from 0); together the ranks must have all layers and heads",
      cell / size.heads, cell % size.heads));
}

Shard shard_of(std::uint32_t first_layer, std::uint32_t num_layers, std::uint32_t num_heads, std::uint32_t tp_rank,
               std::uint32_t tp_size) {
  const auto first = static_cast<std::uint32_t>(std::uint64_t{tp_rank} * num_heads / tp_size);
  return {first_layer, num_layers, first, std::max(1u, num_heads / tp_size)};
}

Result<ShardMap> map_shards(std::span<const Shard> readers, std::span<const Shard> holders) {
  KVFERRY_TRY(check_shards(readers));
  KVFERRY_TRY(check_shards(holders));
  const Size here = whole_of(readers), there = whole_of(holders);
  if (here != there) {
    return Error{
        ErrorCode::kInvalidArgument,
        fmt::format("the reading node's model has {} layers of {} KV heads, the holding node's has {} layers of {} KV "
                    "heads; both must run the same model",
                    here.layers, here.heads, there.layers, there.heads)};
  }
  std::uint64_t num_cells = 0;
  for (const Shard& reader : readers) num_cells += reader.num_cells();
  if (num_cells * holders.size() > kMaxWork)
    return Error{
        ErrorCode::kInvalidArgument,
        fmt::format("{} ranks can't read a model with {} layers of {} KV heads from {} ranks: they have {} "
                    "combinations of a layer, a head and two ranks, of which at most {} are allowed; use fewer ranks",
                    readers.size(), here.layers, here.heads, holders.size(), num_cells * holders.size(), kMaxWork)};
  ShardMap map;
  std::map<Shard, std::size_t> turns;
  for (const Shard& reader : readers) map.push_back(runs_of(reader, turns[reader]++, holders));
  return map;
}

}  // namespace kvferry
