// Over 300 lines, because shards and parts are checked and mapped in the same way, with the same limits.
#include "transport/base/shard_map.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <utility>

namespace kvferry {
namespace {

// Limits on the work that a peer's message can cause; no real model exceeds them.
constexpr std::uint32_t kMaxLayers = 4096, kMaxHeads = 4096;
constexpr std::size_t kMaxRanks = 4096;
constexpr std::uint64_t kMaxCells = 1ULL << 20;  // limit on the model's cells, and on the sum over a node's ranks
constexpr std::uint64_t kMaxWork = 1ULL << 28;   // limit on (number of readers' cells) * (number of holders)
constexpr std::size_t kMaxParts = 1024;          // limit on the kinds of layers, and on the parts of one kind
constexpr std::uint64_t kMaxPartBytes = 1ULL << 40;

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

struct LongestRun {
  std::uint32_t holder = 0;
  std::uint64_t length = 0;  // 0: no holder has what is wanted
};

/// Returns the longest run; taking it each time gives the fewest runs. `length_of` returns how much of what is wanted a
/// holder has from here on. `turn` selects among holders with equally long runs.
template <class LengthOf>
LongestRun longest_run(std::size_t num_holders, std::size_t turn, LengthOf length_of) {
  std::uint64_t longest = 0;
  std::vector<std::uint32_t> best;
  for (std::uint32_t rank = 0; rank < num_holders; ++rank) {
    const std::uint64_t length = length_of(rank);
    if (length > longest) best.clear();
    longest = std::max(longest, length);
    if (length == longest && length > 0) best.push_back(rank);
  }
  if (best.empty()) return {};
  return {best[turn % best.size()], longest};
}

/// Returns the runs that fill the reader's chunk. `turn` selects among holders with equally long runs.
std::vector<ShardRun> runs_of(const Shard& reader, std::size_t turn, std::span<const Shard> holders) {
  std::vector<ShardRun> runs;
  for (std::uint64_t cell = 0; cell < reader.num_cells(); cell += runs.back().cells) {
    const auto layer = static_cast<std::uint32_t>(reader.first_layer + cell / reader.num_heads);
    const auto head = static_cast<std::uint32_t>(reader.first_head + cell % reader.num_heads);
    const auto [holder, length] = longest_run(holders.size(), turn, [&](std::uint32_t rank) -> std::uint64_t {
      return holders[rank].has(layer, head) ? run_length(reader, holders[rank], layer, head) : 0;
    });
    runs.push_back({holder, cell_of(holders[holder], layer, head), cell, length});
  }
  return runs;
}

Error bad_shards(std::string what) { return Error{ErrorCode::kInvalidArgument, std::move(what)}; }

/// Where the layers and parts of a rank begin in its chunk.
struct Placed {
  explicit Placed(const ShardParts& from) : rank(from) {
    for (const std::vector<LayerPart>& kind : rank.parts) {
      part_at.emplace_back(1, 0);
      for (const LayerPart& part : kind) part_at.back().push_back(part_at.back().back() + part.bytes);
    }
    std::uint64_t end = 0;
    for (const std::uint32_t kind : rank.kinds) layer_at.push_back(std::exchange(end, end + part_at[kind].back()));
  }
  bool has(std::uint32_t layer) const {
    return layer >= rank.first_layer && layer - rank.first_layer < rank.kinds.size();
  }
  const std::vector<LayerPart>& parts_of(std::uint32_t layer) const {
    return rank.parts[rank.kinds[layer - rank.first_layer]];
  }
  /// Returns the offset in the chunk of byte `place` of the whole part.
  std::uint64_t offset(std::uint32_t layer, std::size_t part, std::uint64_t place) const {
    const std::uint32_t number = layer - rank.first_layer;
    return layer_at[number] + part_at[rank.kinds[number]][part] + (place - parts_of(layer)[part].first);
  }

  const ShardParts& rank;
  std::vector<std::vector<std::uint64_t>> part_at;  // [kind][part] offset in the layer; then the layer's size
  std::vector<std::uint64_t> layer_at;              // [layer of the rank] offset in the chunk
};

using Wholes = std::vector<std::vector<std::uint64_t>>;  // [layer of the model][part] size; no parts: no rank has it

Wholes wholes_of(std::span<const ShardParts> ranks) {
  Wholes wholes;
  for (const ShardParts& rank : ranks) {
    wholes.resize(std::max<std::size_t>(wholes.size(), rank.first_layer + rank.kinds.size()));
    for (std::size_t layer = 0; layer < rank.kinds.size(); ++layer) {
      std::vector<std::uint64_t>& sizes = wholes[rank.first_layer + layer];
      if (!sizes.empty()) continue;
      for (const LayerPart& part : rank.parts[rank.kinds[layer]]) sizes.push_back(part.whole);
    }
  }
  return wholes;
}

/// Adds the runs that fill one part of one layer of the reader. `turn` selects among holders with equally long runs.
Result<void> add_runs(const Placed& reader, std::size_t turn, std::uint32_t layer, std::size_t part,
                      std::span<const Placed> holders, std::vector<ShardRun>& runs) {
  const LayerPart& wanted = reader.parts_of(layer)[part];
  if (wanted.whole == 0) return {};
  const std::uint64_t end = wanted.first + wanted.bytes;
  for (std::uint64_t place = wanted.first; place < end;) {
    const auto [holder, length] = longest_run(holders.size(), turn, [&](std::uint32_t rank) -> std::uint64_t {
      if (!holders[rank].has(layer)) return 0;
      const LayerPart& has = holders[rank].parts_of(layer)[part];
      if (place < has.first || place - has.first >= has.bytes) return 0;
      return std::min(end, has.first + has.bytes) - place;
    });
    if (length == 0)
      return bad_shards(
          fmt::format("no rank of the holding node has byte {} of part {} of layer {} (counted "
                      "from 0); together the ranks must have all of them",
                      place, part, layer));
    const ShardRun run{holder, holders[holder].offset(layer, part, place), reader.offset(layer, part, place), length};
    ShardRun* const last = runs.empty() ? nullptr : &runs.back();
    const bool goes_on = last != nullptr && last->holder == holder && last->source + last->cells == run.source &&
                         last->target + last->cells == run.target;
    if (goes_on)
      last->cells += length;
    else
      runs.push_back(run);
    place += length;
  }
  return {};
}

}  // namespace

std::uint64_t ShardParts::num_bytes() const {
  std::uint64_t bytes = 0;
  for (const std::uint32_t kind : kinds)
    for (const LayerPart& part : parts[kind]) bytes += part.bytes;
  return bytes;
}

Result<void> check_shards(std::span<const Shard> shards) {
  if (shards.empty() || shards.size() > kMaxRanks)
    return bad_shards(fmt::format("a node can't have {} ranks; 1 to 4096 are allowed", shards.size()));
  for (const Shard& shard : shards) {
    const bool is_sane = shard.num_layers > 0 && shard.num_heads > 0 && shard.first_layer < kMaxLayers &&
                         shard.num_layers <= kMaxLayers && shard.first_head < kMaxHeads && shard.num_heads <= kMaxHeads;
    if (!is_sane)
      return bad_shards(fmt::format(
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
    return bad_shards(
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
  return bad_shards(fmt::format(
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

Result<void> check_parts(std::span<const ShardParts> ranks) {
  if (ranks.empty() || ranks.size() > kMaxRanks)
    return bad_shards(fmt::format("a node can't have {} ranks; 1 to {} are allowed", ranks.size(), kMaxRanks));
  std::uint64_t num_parts = 0;
  for (const ShardParts& rank : ranks) {
    const bool is_sane = !rank.kinds.empty() && rank.kinds.size() <= kMaxLayers && rank.first_layer < kMaxLayers &&
                         rank.parts.size() <= kMaxParts;
    if (!is_sane)
      return bad_shards(
          fmt::format("a rank can't have {} layers of {} kinds from layer {} on; allowed: 1 to {} layers of at "
                      "most {} kinds from layer 0 to {} on",
                      rank.kinds.size(), rank.parts.size(), rank.first_layer, kMaxLayers, kMaxParts, kMaxLayers - 1));
    for (const std::vector<LayerPart>& kind : rank.parts) {
      if (kind.empty() || kind.size() > kMaxParts)
        return bad_shards(fmt::format("a layer can't have {} parts; 1 to {} are allowed", kind.size(), kMaxParts));
      num_parts += kind.size();
      for (const LayerPart& part : kind) {
        const std::uint64_t limit = part.whole == 0 ? kMaxPartBytes : part.whole;
        if (part.whole > kMaxPartBytes || part.bytes > limit || part.first > limit - part.bytes ||
            (part.bytes == 0 && part.whole > 0))
          return bad_shards(
              fmt::format("a rank can't have {} bytes from byte {} on of a part of {} bytes; allowed: at least "
                          "1 byte inside the part, of at most {} bytes",
                          part.bytes, part.first, part.whole, kMaxPartBytes));
      }
    }
    for (const std::uint32_t kind : rank.kinds) {
      if (kind >= rank.parts.size())
        return bad_shards(
            fmt::format("a rank has a layer of kind {}, but describes {} kinds", kind, rank.parts.size()));
      num_parts += rank.parts[kind].size();
    }
  }
  if (num_parts > kMaxCells)
    return bad_shards(fmt::format("the layers of {} ranks have {} parts; at most {} are allowed", ranks.size(),
                                  num_parts, kMaxCells));
  const Wholes wholes = wholes_of(ranks);
  for (const ShardParts& rank : ranks)
    for (std::size_t layer = 0; layer < rank.kinds.size(); ++layer)
      if (!std::ranges::equal(wholes[rank.first_layer + layer], rank.parts[rank.kinds[layer]], {}, {},
                              &LayerPart::whole))
        return bad_shards(fmt::format("the ranks of a node do not agree on the parts of layer {} (counted from 0)",
                                      rank.first_layer + layer));
  return {};
}

Result<ShardMap> map_parts(std::span<const ShardParts> readers, std::span<const ShardParts> holders) {
  KVFERRY_TRY(check_parts(readers));
  KVFERRY_TRY(check_parts(holders));
  const Wholes here = wholes_of(readers), there = wholes_of(holders);
  if (here.size() != there.size())
    return bad_shards(
        fmt::format("the reading node's model has {} layers, the holding node's has {}; both must run the same "
                    "model",
                    here.size(), there.size()));
  if (const auto [ours, theirs] = std::ranges::mismatch(here, there); ours != here.end())
    return bad_shards(
        fmt::format("the reading node's layer {} (counted from 0) has {} parts of {} bytes on all of its ranks "
                    "together, the holding node's has {} parts of {} bytes, which are divided otherwise; both "
                    "must run the same model",
                    ours - here.begin(), ours->size(), std::reduce(ours->begin(), ours->end()), theirs->size(),
                    std::reduce(theirs->begin(), theirs->end())));
  std::uint64_t num_parts = 0;
  for (const ShardParts& reader : readers)
    for (const std::uint32_t kind : reader.kinds) num_parts += reader.parts[kind].size();
  // A part of a reader needs at most one run of each holder, and for each run all holders are looked at.
  if (num_parts * holders.size() * holders.size() > kMaxWork)
    return bad_shards(
        fmt::format("{} ranks can't read a model with {} layers that have states from {} ranks; use fewer ranks",
                    readers.size(), here.size(), holders.size()));
  const std::vector<Placed> from(holders.begin(), holders.end());
  ShardMap map;
  std::uint64_t num_runs = 0;
  std::map<ShardParts, std::size_t> turns;
  for (const ShardParts& parts : readers) {
    const Placed reader(parts);
    const std::size_t turn = turns[parts]++;
    std::vector<ShardRun>& runs = map.emplace_back();
    for (std::uint32_t layer = parts.first_layer; layer < parts.first_layer + parts.kinds.size(); ++layer) {
      for (std::size_t part = 0; part < reader.parts_of(layer).size(); ++part)
        KVFERRY_TRY(add_runs(reader, turn, layer, part, from, runs));
      if (num_runs + runs.size() > kMaxCells)
        return bad_shards(
            fmt::format("{} ranks would have to read a model with states in more than {} runs from {} "
                        "ranks; use fewer ranks",
                        readers.size(), kMaxCells, holders.size()));
    }
    num_runs += runs.size();
  }
  return map;
}

}  // namespace kvferry
