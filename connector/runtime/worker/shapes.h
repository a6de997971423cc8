// Two nodes of different shapes (tensor and pipeline parallelism): what the one that reads makes of the other's answer,
// and what the other has to tell it. Used by the scheduler node's thread alone.
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

// ---- the side that reads ----
/// How ranks `here` read what `answer` leases, which loses the chunks that don't say what they should; an empty map:
/// both have the same shape. An error is a sentence that says why they can't.
Result<ShardMap> fit_answer(const std::vector<RankEndpoint>& here, LeaseAnswer& answer);

/// What one rank is told of a pull. `map`: as fit_answer() gave it for the holder with these ranks.
PullOrder order_for(std::uint32_t rank, const StartPull& wanted, const std::vector<RankEndpoint>& here,
                    const std::vector<RankEndpoint>& there, const ShardMap& map, TimeNs now);

// ---- the side that is read ----
/// Lease answers that wait for the workers, who hash the runs of other shapes' readers. Runs that are whole chunks need
/// none of it: their checksums are known.
class RunChecksums {
 public:
  /// `here`: this node's shards.
  explicit RunChecksums(std::vector<Shard> here) : here_(std::move(here)) {}

  /// Whether a reader needs something that is not in the answer as it is.
  bool is_needed(const LeaseRequest& request) const { return !request.shards.empty() && request.shards != here_; }
  /// An error is a sentence for the reader, who can't be served.
  Result<void> check(const LeaseRequest& request);

  struct RankOrder {
    std::uint32_t rank = 0;
    ChecksumOrder order;
  };
  /// Takes an answer to a checked request and returns what the workers have to do for it; perhaps nothing.
  std::vector<RankOrder> begin(std::string sender, std::uint64_t id, std::uint32_t version, const LeaseRequest& request,
                               LeaseAnswer answer, TimeNs now, TimeNs patience);
  void take(const ChecksumOutcome& outcome);

  struct Ready {
    std::string sender;
    std::uint64_t id = 0;
    std::uint32_t version = 0;      // that the request was in
    LeaseAnswer answer;             // without the chunks that are damaged or that a rank said nothing of
    std::vector<ChunkKey> damaged;  // these
    std::size_t num_late = 0;       // and so many
  };
  /// Answers that are complete, or whose time is up.
  std::vector<Ready> take_ready(TimeNs now);
  std::size_t num_waiting() const { return waiting_.size(); }

 private:
  struct Part {  // one rank's runs, and where each of them is wanted
    std::vector<ShardRun> runs;
    std::map<std::pair<std::uint64_t, std::uint64_t>, std::size_t> index;  // (source, cells) -> run
  };
  struct Waiting {
    std::string sender;
    std::uint64_t id = 0;
    std::uint32_t version = 0;
    LeaseAnswer answer;
    std::vector<ChunkKey> keys;  // [chunk]
    std::shared_ptr<const ShardMap> map;
    std::map<std::uint32_t, Part> parts;                                          // by rank
    std::map<std::pair<std::uint32_t, std::uint32_t>, ChecksumOutcome> outcomes;  // by rank and chunk
    TimeNs deadline = 0;
  };
  std::shared_ptr<const ShardMap> map_for(const std::vector<Shard>& readers);
  bool is_whole(const ShardRun& run) const { return run.cells == here_[run.holder].num_cells(); }
  Ready finish(Waiting waiting) const;

  std::vector<Shard> here_;
  std::map<std::vector<Shard>, std::shared_ptr<const ShardMap>> maps_;  // of readers that asked
  std::map<std::uint64_t, Waiting> waiting_;                            // by order
  std::uint64_t last_order_ = 0;
};

}  // namespace kvferry
