// The worker connector's state machine, one for each rank. It knows which slots may be written or read, which pulls are
// in progress, and which results to report. It has no I/O: the runtime moves the bytes and calls WorkerCore under one
// lock.
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

/// The pool of one rank of another node.
struct PullSource {
  std::string address;
  std::string region;
  std::uint64_t slot_bytes = 0;
  KVFERRY_FIELDS(address, region, slot_bytes);
};

/// The scheduler's order to copy chunks of another node into this rank's pool: from the rank with the same number or,
/// if the nodes' shards differ, in runs (shard_map.h) from one or more ranks.
struct PullOrder {
  std::uint64_t pull = 0;
  std::string remote_address;  // transport address of the rank with the same number
  std::string remote_region;   // exported region of the pool of the rank with the same number
  std::int64_t timeout_ms = 0;
  std::vector<PullItem> items;
  std::vector<PullSource> sources = {};  // ranks of the other node to read from; empty: only the rank at remote_address
  std::vector<ShardRun> runs = {};       // runs to read for each chunk; ShardRun::holder is an index into `sources`
  std::uint64_t num_cells = 0;           // number of cells or bytes (shard_map.h) in a chunk of this rank
  std::string remote_frames = {};        // exported region of the frames at remote_address; empty: no frames
  std::uint64_t remote_frame_bytes = 0;  // size of a frame of GPU memory at remote_address
  KVFERRY_FIELDS(pull, remote_address, remote_region, timeout_ms, items, sources, runs, num_cells, remote_frames,
                 remote_frame_bytes);
};
/// The scheduler's message about items of a pull whose chunks the holder still writes (PullItem::is_growing): the
/// layers that may be pulled, as in PushProgress, or the end of the holder's write.
struct PullProgress {
  std::uint64_t pull = 0;
  std::vector<std::uint32_t> items;  // places in PullOrder::items
  std::uint32_t done = 0, of = 0;
  bool is_settled = false;               // true if the holder's write has ended; `done` and `of` are then ignored
  std::vector<std::uint64_t> checksums;  // [rank] if is_settled; empty: the chunk will not be completed
  KVFERRY_FIELDS(pull, items, done, of, is_settled, checksums);
};
struct PullOutcome {
  std::uint64_t pull = 0;
  std::uint32_t rank = 0;
  std::vector<bool> ok;                       // [item] true if the chunk has arrived and is verified
  std::string what;                           // reason of the last failure, for the log; empty: none
  std::vector<std::uint64_t> checksums = {};  // [item] this rank's checksums; set if PullItem::checksums is empty
  std::uint8_t code = 0;                      // ErrorCode of the last failure
  std::string path = {};                      // the path that moved the bytes
  std::uint32_t limit_mb_per_s = 0;           // measured limit of this rank's path, see LifeEvent
  TimeNs post = 0, wire = 0, unpack = 0;      // parts of the pull's time, see LifeEvent; all 0 if no transfer ended
  std::uint32_t num_in_frames = 0;            // number of chunks that came from frame to frame
  // Number of chunks that the holder had in a frame, but that were not pulled from it.
  std::uint32_t num_past_frames = 0;
  // Why some chunk came from slot to slot; of several reasons, one about a chunk that the holder had in a frame. Empty
  // if no chunk did, or if neither node has frames.
  std::string host_why = {};
  /// [item] true if the chunk is verified in a frame of GPU memory; a SlotsWritten follows when the copy to its slot
  /// has ended. Empty: no chunk is in a frame.
  std::vector<bool> in_frames = {};
  KVFERRY_FIELDS(pull, rank, ok, what, checksums, code, path, limit_mb_per_s, post, wire, unpack, num_in_frames,
                 num_past_frames, host_why, in_frames);
};
/// The ends of a rank's copies of pulled chunks from frames to slots. A chunk whose copy failed is dropped.
struct SlotsWritten {
  std::uint32_t rank = 0;
  std::vector<ChunkRef> chunks;
  std::vector<bool> ok;  // [chunk] true if the chunk is in its slot now
  KVFERRY_FIELDS(rank, chunks, ok);
};

struct LoadOutcome {
  std::uint32_t tokens_loaded = 0;
  std::vector<ChunkRef> corrupt;  // as LoadDone::corrupt
};

class WorkerCore {
 public:
  WorkerCore(std::uint32_t rank, std::uint32_t num_slots) : rank_(rank), slots_(num_slots) {}

  // ---- steps, and the writes and reads of slots ----
  /// Begins the step of a plan. The caller must call this once for each step, in increasing order.
  void begin_step(std::uint64_t step);
  /// Begins a write of the slot, which must be writable().
  void begin_write(ChunkRef chunk);
  /// Returns true if the slot exists, is not being written and has an older generation. The caller checks an order from
  /// a socket with this function, and refuses the order if the result is false.
  bool writable(ChunkRef chunk) const;
  void end_write(ChunkRef chunk, bool ok);
  /// Records a save's end or, if SaveDone::is_in_frame, that the chunk can be loaded from its frame: the write of its
  /// slot then goes on until the second call for the chunk.
  void saved(const SaveDone& save);
  /// Returns true if the slot has a complete chunk of exactly this generation. The caller still verifies the checksum.
  bool readable(ChunkRef chunk) const;
  /// Returns true if a load may read the chunk: it is readable(), or whole in a frame from which it is being copied to
  /// its slot.
  bool loadable(ChunkRef chunk) const;
  /// Returns true if a chunk of exactly this generation is being written into the slot.
  bool arriving(ChunkRef chunk) const;
  void loaded(const LoadJob& job, LoadOutcome outcome);
  /// `total` is Transport::num_refused(). The next report has its growth.
  void accesses_refused(std::uint64_t total);
  /// Returns the results since the last call, nullopt if there are none.
  std::optional<WorkerReport> take_report();

  // ---- pulls ----
  /// Begins the writes of the pull's slots. The runtime then starts the transfer. Returns kInvalidArgument, and begins
  /// nothing, if the pull is in progress already, its timeout is out of range, or a slot is not writable() or is named
  /// twice.
  Result<void> pull_ordered(const PullOrder& order, TimeNs now);
  /// Ends a pull. The runtime must call this exactly once for each pull, when the transfer no longer touches memory.
  /// in_frames[i] is true if chunk i is verified in a frame, but still being copied to its slot; an empty vector stands
  /// for none. The write of such a slot goes on until slot_written().
  PullOutcome pull_ended(std::uint64_t pull, std::vector<bool> ok, std::string what, std::vector<bool> in_frames = {});
  /// Ends the copy of a chunk from a frame to its slot.
  void slot_written(ChunkRef chunk, bool ok);
  /// Returns the pulls whose deadline has passed since the last call. The runtime cancels them and then calls
  /// pull_ended().
  std::vector<std::uint64_t> overdue_pulls(TimeNs now);
  std::size_t num_pulls() const { return pulls_.size(); }
  std::uint32_t rank() const { return rank_; }

 private:
  struct Slot {
    std::uint64_t generation = 0;
    bool writing = false;
    bool complete = false;
    bool in_frame = false;  // true if the chunk is complete in a frame, from which the slot is being written
  };
  struct Pull {
    std::vector<ChunkRef> chunks;
    TimeNs deadline = 0;
    bool cancelled = false;
  };
  Slot& slot(ChunkRef chunk);
  void reached_frame(ChunkRef chunk);

  std::uint32_t rank_;
  std::vector<Slot> slots_;
  std::map<std::uint64_t, Pull> pulls_;
  WorkerReport report_;
  std::uint64_t step_ = 0;
  std::uint64_t num_accesses_refused_ = 0;
};

}  // namespace kvferry
