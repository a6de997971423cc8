// The worker half of the connector: which slot may be written or read now, which pulls are under way, what has to be
// reported. A pure state machine, one per rank; the runtime moves the bytes and calls it under one lock.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "connector/core/peer_wire.h"
#include "connector/core/plan.h"
#include "transport/base/clock.h"
#include "transport/base/result.h"

namespace kvferry {

/// A rank of another node, and its pool.
struct PullSource {
  std::string address;
  std::string region;
  std::uint64_t slot_bytes = 0;
  KVFERRY_FIELDS(address, region, slot_bytes);
};

/// The scheduler's order to bring chunks of another node into this rank's pool: of the same rank, or, where the node's
/// shape is another, put together from runs of several.
struct PullOrder {
  std::uint64_t pull = 0;
  std::string remote_address;  // of the other rank's transport
  std::string remote_region;   // of its pool
  std::int64_t timeout_ms = 0;
  std::vector<PullItem> items;
  std::vector<PullSource> sources = {};  // empty: remote_address alone
  std::vector<ShardRun> runs = {};       // of each chunk; `holder` counts the sources
  std::uint64_t num_cells = 0;           // of this rank
  KVFERRY_FIELDS(pull, remote_address, remote_region, timeout_ms, items, sources, runs, num_cells);
};
struct PullOutcome {
  std::uint64_t pull = 0;
  std::uint32_t rank = 0;
  std::vector<bool> ok;                       // [item]
  std::string what;                           // why not, for the log
  std::vector<std::uint64_t> checksums = {};  // [item] of this rank's chunk, where nobody knew it before
  KVFERRY_FIELDS(pull, rank, ok, what, checksums);
};

/// What verified bytes a load found.
struct LoadOutcome {
  std::uint32_t tokens_loaded = 0;
  std::vector<ChunkRef> corrupt;
};

class WorkerCore {
 public:
  WorkerCore(std::uint32_t rank, std::uint32_t num_slots) : rank_(rank), slots_(num_slots) {}

  // ---- steps, in the order of plan.h ----
  /// Every plan exactly once, in order.
  void begin_step(std::uint64_t step);
  /// The slot's old bytes may go: nobody writes it, and the generation is newer than the one it had.
  void begin_write(ChunkRef chunk);
  void end_write(ChunkRef chunk, bool ok);
  void saved(ChunkRef chunk, bool ok, std::uint64_t checksum);
  /// True when the slot holds exactly this generation, complete; its bytes still have to match the checksum.
  bool readable(ChunkRef chunk) const;
  void loaded(const LoadJob& job, LoadOutcome outcome);
  /// What happened since the last call; nullopt when nothing did.
  std::optional<WorkerReport> take_report();

  // ---- pulls ----
  /// Claims the slots. The runtime then starts the transfer.
  void pull_ordered(const PullOrder& order, TimeNs now);
  /// The outcome of each item, after the transfer's memory is quiet; exactly once per pull.
  PullOutcome pull_ended(std::uint64_t pull, std::vector<bool> ok, std::string what);
  /// Pulls whose deadline passed since the last call: cancel them; pull_ended() still follows.
  std::vector<std::uint64_t> overdue_pulls(TimeNs now);
  std::size_t num_pulls() const { return pulls_.size(); }
  std::uint32_t rank() const { return rank_; }

 private:
  struct Slot {
    std::uint64_t generation = 0;
    bool writing = false;
    bool complete = false;
  };
  struct Pull {
    std::vector<ChunkRef> chunks;
    TimeNs deadline = 0;
    bool cancelled = false;
  };
  Slot& slot(ChunkRef chunk);

  std::uint32_t rank_;
  std::vector<Slot> slots_;
  std::map<std::uint64_t, Pull> pulls_;
  WorkerReport report_;
  std::uint64_t step_ = 0;
};

}  // namespace kvferry
