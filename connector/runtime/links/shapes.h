// Reads between nodes of different shapes (tensor and pipeline parallelism): how the reader interprets the holder's
// answer, and which checksums the holder has to send. Used by the scheduler node's thread alone.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "connector/core/scheduler/scheduler_core.h"
#include "connector/runtime/links/node_wire.h"
#include "transport/base/clock.h"
#include "transport/base/shard_map.h"

namespace kvferry {

std::vector<Shard> shards_of(const std::vector<RankEndpoint>& ranks);
/// Returns the ranks' parts; an empty vector if the chunks of all ranks are described by shards alone.
std::vector<ShardParts> parts_of(const std::vector<RankEndpoint>& ranks);
/// Checks what a node says of its own ranks.
Result<void> check_ranks(const std::vector<RankEndpoint>& ranks);

// ---- the reader ----
/// Returns how the ranks `here` read the chunks leased by `answer`; an empty map if both nodes have the same shape, or
/// if the holder sent no shape. If the shapes differ, removes from `answer` the chunks that don't have a checksum for
/// each run. The error says in a sentence why the shapes don't fit.
Result<ShardMap> fit_answer(const std::vector<RankEndpoint>& here, LeaseAnswer& answer);

/// Returns the order to one rank for a pull. `map`: the result of fit_answer() for the holder with the ranks `there`.
PullOrder order_for(std::uint32_t rank, const StartPull& wanted, const std::vector<RankEndpoint>& here,
                    const std::vector<RankEndpoint>& there, const ShardMap& map, TimeNs now);

// ---- the holder ----
/// Lease answers that wait until the workers have hashed the runs (parts of chunks) that a reader of another shape will
/// pull. A run that is a whole chunk needs no hashing: its checksum is known.
class RunChecksums {
 public:
  /// `here`: this node's shards. `parts`: the result of parts_of() for this node.
  explicit RunChecksums(std::vector<Shard> here, std::vector<ShardParts> parts = {})
      : here_(std::move(here)), parts_(std::move(parts)) {}

  /// Returns true if the reader has another shape than this node, so that it needs checksums of runs.
  bool is_needed(const LeaseRequest& request) const { return !request.shards.empty() && request.shards != here_; }
  /// Checks that the reader can be served. The error is a sentence for the reader.
  Result<void> check(const LeaseRequest& request);

  struct RankOrder {
    std::uint32_t rank = 0;
    ChecksumOrder order;
  };
  /// Stores the answer to a checked request. Returns the orders for the workers, if any run has to be hashed.
  std::vector<RankOrder> begin(Asker asker, const LeaseRequest& request, LeaseAnswer answer, TimeNs now,
                               TimeNs patience);
  void take(const ChecksumOutcome& outcome);

  struct Ready {
    Asker asker;
    LeaseAnswer answer;             // the answer, without the chunks that are damaged or were not hashed in time
    std::vector<ChunkKey> damaged;  // keys of chunks left out as damaged, or no longer in a rank's slot
    std::size_t num_late = 0;       // number of chunks left out because a rank had not hashed them at the deadline
  };
  /// Returns the answers that are complete, or whose deadline has passed.
  std::vector<Ready> take_ready(TimeNs now);
  std::size_t num_waiting() const { return waiting_.size(); }
  std::size_t num_runs_kept() const { return num_runs_kept_; }

 private:
  struct Part {  // The runs that one rank hashes.
    std::vector<ShardRun> runs;
    std::map<std::pair<std::uint64_t, std::uint64_t>, std::size_t> index;  // place in `runs` by (source, cells)
  };
  struct Waiting {
    Asker asker;
    LeaseAnswer answer;
    std::vector<ChunkKey> keys;  // [chunk] key of the leased chunk
    std::shared_ptr<const ShardMap> map;
    std::map<std::uint32_t, Part> parts;                                          // keyed by rank
    std::map<std::pair<std::uint32_t, std::uint32_t>, ChecksumOutcome> outcomes;  // keyed by rank and the chunk's index
    TimeNs deadline = 0;
  };
  /// Checks that no rank has to hash much more than its own chunk. The error is a sentence for the reader.
  Result<void> check_reads(const ShardMap& map) const;
  Result<std::shared_ptr<const ShardMap>> map_for(const LeaseRequest& request);
  /// Returns the number of cells of a rank's chunk or, if the rank is described by parts, of its bytes.
  std::uint64_t num_cells(std::uint32_t rank) const {
    return parts_.empty() ? here_[rank].num_cells() : parts_[rank].num_bytes();
  }
  bool is_whole(const ShardRun& run) const { return run.cells == num_cells(run.holder); }
  Ready finish(Waiting waiting) const;

  std::vector<Shard> here_;
  std::vector<ShardParts> parts_;
  using Readers = std::pair<std::vector<Shard>, std::vector<ShardParts>>;
  std::map<Readers, std::shared_ptr<const ShardMap>> maps_;
  std::size_t num_runs_kept_ = 0;             // number of runs in maps_
  std::map<std::uint64_t, Waiting> waiting_;  // keyed by ChecksumOrder::order
  std::uint64_t last_order_ = 0;
};

}  // namespace kvferry
