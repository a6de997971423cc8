// Which part of a model's KV each rank of a node holds, and how a rank of one node reads its part from the ranks of
// another, whatever tensor and pipeline parallelism the two have. Pure.
//
// A cell is what a chunk has of one layer and one KV head: K and V of all its tokens, or the latent of MLA, which
// counts as one head. A rank's chunk is its cells, layer by layer and head by head, so a run of cells is a run of
// bytes: its size and place are those in cells times the bytes of a cell. Data parallel engines are nodes of their own.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "transport/base/result.h"
#include "transport/base/wire.h"

namespace kvferry {

/// A rectangle of cells: layers of a pipeline stage, heads of a tensor parallel rank. Ranks may hold the same heads.
struct Shard {
  std::uint32_t first_layer = 0;
  std::uint32_t num_layers = 0;
  std::uint32_t first_head = 0;
  std::uint32_t num_heads = 0;

  std::uint64_t num_cells() const { return std::uint64_t{num_layers} * num_heads; }
  bool has(std::uint32_t layer, std::uint32_t head) const {
    return layer >= first_layer && layer - first_layer < num_layers && head >= first_head &&
           head - first_head < num_heads;
  }
  auto operator<=>(const Shard&) const = default;
  KVFERRY_FIELDS(first_layer, num_layers, first_head, num_heads);
};

/// All but `holder` in cells.
struct ShardRun {
  std::uint32_t holder = 0;  // rank
  std::uint64_t source = 0;  // in the holder's chunk
  std::uint64_t target = 0;  // in the reader's chunk
  std::uint64_t cells = 0;
  auto operator<=>(const ShardRun&) const = default;
  KVFERRY_FIELDS(holder, source, target, cells);
};

/// kInvalidArgument: a shard is empty or absurdly large, or together they leave a cell of the whole out.
Result<void> check_shards(std::span<const Shard> shards);

/// The share of rank (stage, tensor rank): all heads in equal parts, or, where there are more ranks than heads, each
/// head on several neighbours, as vLLM does it.
Shard shard_of(std::uint32_t first_layer, std::uint32_t num_layers, std::uint32_t num_heads, std::uint32_t tp_rank,
               std::uint32_t tp_size);

using ShardMap = std::vector<std::vector<ShardRun>>;  // [reader's rank][run]

/// Where each cell of each reader's chunk is read, in the order of that chunk, in as few runs as can be. Readers of
/// the same cells spread over the ranks that hold them. The same shards on both sides: each rank reads all of its own
/// number's chunk. Both sides compute it, so every node has to come to the same answer. kInvalidArgument: a side is not
/// as check_shards() wants it, or the two are of different sizes.
Result<ShardMap> map_shards(std::span<const Shard> readers, std::span<const Shard> holders);

}  // namespace kvferry
