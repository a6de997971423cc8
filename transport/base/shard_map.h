// Which part of a model's KV each rank of a node holds, and how a rank of one node reads its part from the ranks of
// another node. The two nodes may differ in tensor and pipeline parallelism. All functions are pure.
//
// A cell is what a chunk has of one layer and one KV head: K and V of all its tokens, or the latent of MLA, which
// counts as one head. A rank's chunk is its cells, layer by layer and head by head, so a run of cells is a run of
// bytes: size and offset in bytes are those in cells times the size of a cell. Each data parallel engine is a node.
//
// A state is not divided by KV heads, so a rank of a model that has layers with state is described by parts: runs of
// bytes of a layer, of each of which tensor parallel ranks hold consecutive bytes. All chunks of such a model have one
// length.
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

/// A part of one layer of a rank's chunk, in bytes: the KV of all heads or, of a state, what is divided by itself, such
/// as one row of a convolution's window.
struct LayerPart {
  std::uint64_t whole = 0;  // bytes of the part on all ranks together; 0: padding, which no node reads
  std::uint64_t first = 0;  // place of the rank's first byte among these; ranks may hold the same bytes
  std::uint64_t bytes = 0;  // number of the rank's bytes; 0 in padding alone
  auto operator<=>(const LayerPart&) const = default;
  KVFERRY_FIELDS(whole, first, bytes);
};

/// The chunk of a rank of a model that has layers with state. No layers: the chunk is described by a Shard alone.
struct ShardParts {
  std::uint32_t first_layer = 0;
  std::vector<std::uint32_t> kinds;           // [layer of the rank] index in `parts`
  std::vector<std::vector<LayerPart>> parts;  // [kind of layer] the parts in the order of the chunk's bytes

  /// Returns the size of the chunk. check_parts() must have accepted the parts.
  std::uint64_t num_bytes() const;
  auto operator<=>(const ShardParts&) const = default;
  KVFERRY_FIELDS(first_layer, kinds, parts);
};

/// A run of cells to read; all fields but `holder` count cells or, between ranks that are described by parts, bytes.
struct ShardRun {
  std::uint32_t holder = 0;  // number of the rank from which the run is read
  std::uint64_t source = 0;  // offset in the holder's chunk
  std::uint64_t target = 0;  // offset in the reader's chunk
  std::uint64_t cells = 0;
  auto operator<=>(const ShardRun&) const = default;
  KVFERRY_FIELDS(holder, source, target, cells);
};

/// Returns kInvalidArgument if there are no shards or too many, if a shard is empty or too large, if the shards have
/// too many cells in all, or if some cell of the model is in no shard.
Result<void> check_shards(std::span<const Shard> shards);

/// Returns the shard of a tensor parallel rank in a pipeline stage: heads are split equally or, if there are more ranks
/// than heads, each head is on several neighbouring ranks, as in vLLM.
Shard shard_of(std::uint32_t first_layer, std::uint32_t num_layers, std::uint32_t num_heads, std::uint32_t tp_rank,
               std::uint32_t tp_size);

// [i] the runs that rank i of the reading node reads, in the order of this rank's chunk
using ShardMap = std::vector<std::vector<ShardRun>>;

/// Computes where each cell of each reader's chunk is read, in the order of that chunk, in as few runs as possible.
/// Readers of the same cells are spread over the ranks that hold them. If both nodes have the same parallelism, each
/// rank reads from the rank with the same number. Both nodes compute the map, so the result must depend on the
/// arguments only. Errors: kInvalidArgument if check_shards() rejects readers or holders, if the models differ in size,
/// or if the nodes have too many ranks for a model of this size.
Result<ShardMap> map_shards(std::span<const Shard> readers, std::span<const Shard> holders);

/// Returns kInvalidArgument if there are no ranks or too many, if a number is too large or outside of its range, or if
/// the ranks do not agree on the parts of some layer.
Result<void> check_parts(std::span<const ShardParts> ranks);

/// Same as map_shards() for ranks that are described by parts. No run has padding, so the runs leave gaps where the
/// reader's chunk has some. Errors: kInvalidArgument if check_parts() rejects readers or holders, if the models differ
/// in their layers or in the size of a part, if no holder has some byte, or if there are too many ranks.
Result<ShardMap> map_parts(std::span<const ShardParts> readers, std::span<const ShardParts> holders);

}  // namespace kvferry
