// One rank. Its engine memory and its pool memory consist of stamps. It executes a step's plan in the order that plan.h
// documents.
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "connector/core/core_config.h"
#include "connector/core/peer_wire.h"
#include "connector/core/plan.h"
#include "connector/core/scheduler/request_state.h"
#include "sim_cells.h"
#include "sim_frames.h"
#include "sim_text.h"
#include "transport/base/shard_map.h"

namespace kvferry::sim {

/// The probability of each fault in the workers.
struct WorkerFaults {
  double save_fails = 0;
  double corrupts_load = 0;  // damages a slot that is about to be loaded
};

/// The part of a forward pass for one request: tokens [first, first + num) are computed, and all tokens before them are
/// attended to, in a group with a window only the last of them.
struct ForwardItem {
  std::string request_id;
  const std::vector<Stamp>* stamps = nullptr;  // the stamps that the KV must have
  std::vector<Stamp> drafts;                   // stamps of the tokens from first_draft on, which may be wrong
  std::uint32_t first_draft = 0;
  BlockTable table;
  std::uint32_t first = 0;
  std::uint32_t num = 0;
  // the tokens that kvferry loaded in this admission; decides which promise a wrong cell breaks
  std::uint32_t loaded_from = 0, loaded_to = 0;

  Stamp stamp(std::uint32_t p) const {
    return !drafts.empty() && p >= first_draft ? drafts.at(p - first_draft) : stamps->at(p);
  }
};

struct StepOutcome {
  WorkerReport report;
  std::set<BlockId> bad_blocks;  // blocks whose load failed, of the loads for which the engine does not wait
  std::vector<bool> async_ok;    // [load of the plan for which the engine waits]: the load is complete
  std::vector<bool> garbage;     // [item]: attended to a failed load, directly or through KV of other requests
};

/// A save whose chunk is pushed to another node too.
struct PushedSave {
  std::uint64_t push = 0;
  std::uint32_t index = 0;
  ChunkRef chunk;
  bool ok = false;
  std::uint64_t checksum = 0;
  bool is_in_frame = false;  // true if the chunk is not in its slot yet
};

class Worker {
 public:
  /// Returns the content of a slot into which a chunk was pushed under the key of another chunk.
  static std::vector<Stamp> forged() { return {0xf00}; }
  /// Returns whether the slot has such content. The chunk of a node with another shape consists of several runs, each
  /// of them forged.
  bool is_forged(std::uint32_t slot) const {
    const std::vector<Stamp> stamps = as_written(slot);
    return !stamps.empty() && std::ranges::count(stamps, forged()[0]) == std::ssize(stamps);
  }
  /// `shard`: this rank's part of the model. The KV's mask makes it different in each layer and head. `parts`: the
  /// same of a model with states whose nodes have unlike shapes; then a chunk is one block.
  Worker(std::uint32_t rank, Shard shard, std::uint32_t num_blocks, std::uint32_t num_slots, std::uint64_t seed,
         std::vector<KvGroup> groups, ShardParts parts = {});
  void set_faults(WorkerFaults faults) { faults_ = faults; }
  void set_checkpoints(std::uint32_t alignment) { checkpoint_alignment_ = alignment; }
  /// From now on half of the saves into frames are reported before they are in their slots.
  void set_frames(std::uint32_t num_frames) {
    frames_ = std::make_unique<Frames>(num_frames);
    saves_early_ = num_frames > 0 ? 0.5 : 0;
  }

  /// From now on so many of the pushed saves grow: what is to be saved is taken in the step, and packed into its frame
  /// later (pack(), end_growth()). The report of a later step tells its end.
  void set_growth(double probability) { grows_ = probability; }

  /// Throws Broken if a request attends to a wrong cell, unless the cell is wrong because of a failed load that the
  /// engine does not know yet.
  StepOutcome execute(const StepPlan& plan, const std::vector<ForwardItem>& forward, bool failure_unheard);
  /// Erases the engine's memory, as a sleep does. The pool's memory stays.
  void wipe_cells();

  /// Returns what a peer's one-sided read would get now; empty if there is no such slot.
  std::vector<Stamp> read_slot(std::uint32_t slot) const;
  /// Writes a pulled chunk if it matches the holder's checksum. Returns whether it matches.
  bool write_pulled(const PullItem& item, const std::vector<Stamp>& bytes);
  /// Moves a chunk that write_pulled() has written from its slot into a frame, as if it had been pulled there. Returns
  /// false if no frame is free. Until slot_written(), the slot holds nothing.
  bool move_to_frame(ChunkRef chunk, std::uint64_t checksum);
  /// Ends the copy of such a chunk, or of a saved one, from its frame to its slot. If it failed, neither holds the
  /// chunk.
  void slot_written(ChunkRef chunk, bool ok);
  // ---- chunks that grow in a frame ----
  /// Returns the saves that began to grow since the last call.
  std::vector<SaveItem> take_growths() { return std::exchange(growths_begun_, {}); }
  /// Packs the first layers of a growing save.
  void pack(ChunkRef chunk, std::uint32_t num_layers);
  void end_growth(ChunkRef chunk);
  std::size_t num_growing() const { return growing_.size(); }
  bool is_growing(ChunkRef chunk) const { return growing_.contains(chunk); }
  /// Begins the landing of a chunk that grows at its holder. Returns false if no frame is free.
  bool begin_landing(const PullItem& item);
  void land(ChunkRef chunk, std::size_t first, std::span<const Stamp> stamps) { frames_->put(chunk, first, stamps); }
  /// Ends the landing: hashes the whole chunk. Returns whether it has the checksum; false too if there is none.
  bool end_landing(ChunkRef chunk, std::optional<std::uint64_t> checksum);
  /// Returns the number of stamps that a chunk with this many tokens has in the first layers of the shard.
  std::size_t layers_stamps(std::uint32_t num_layers, std::uint32_t num_tokens) const;
  std::size_t chunk_stamps(std::uint32_t num_tokens) const { return layers_stamps(shard_.num_layers, num_tokens); }

  bool is_in_frame_only(std::uint32_t slot) const { return slots_[slot].is_in_frame_only; }
  Frames& frames() { return *frames_; }
  const Frames& frames() const { return *frames_; }
  /// Does the write of another node into a slot to which it was granted access.
  void write_pushed(ChunkRef local, const std::vector<Stamp>& bytes);
  /// Returns the pushed saves since the last call.
  std::vector<PushedSave> take_pushed() { return std::exchange(pushed_, {}); }
  /// Writes a pulled chunk that was assembled from runs, each of which matches its checksum. Returns the checksum of
  /// the chunk.
  std::uint64_t write_runs(const PullItem& item, const std::vector<Stamp>& bytes);
  /// Returns the number of stamps that ShardRun counts as one, in a chunk with this many tokens: those of a layer and
  /// head or, between ranks that are described by parts, a single one.
  std::size_t run_stamps(std::uint32_t num_tokens) const { return has_parts() ? 1 : num_tokens * groups_.size(); }
  const Shard& shard() const { return shard_; }
  bool has_parts() const { return !parts_.kinds.empty(); }
  /// Returns a slot's stamps of the first cell and KV group as they were written, before any damage and without the
  /// mask. 0: the rank's layers do not show that stamp.
  std::vector<Stamp> plain(std::uint32_t slot) const;
  /// Looks for what a chunk that is described by parts has in a wrong layer, head or place, or of other tokens than
  /// `plain`. Returns where that is; nullopt if there is none. A state is left out as a whole or not at all.
  std::optional<std::string> find_wrong(std::uint32_t slot, const std::vector<Stamp>& plain) const;
  /// Returns the checksum of the slot's stamps as they were written, before any damage.
  std::uint64_t slot_checksum(std::uint32_t slot) const;
  std::uint64_t generation(std::uint32_t slot) const { return slots_[slot].generation; }
  /// Returns whether the slot's bytes were damaged after they were written.
  bool damaged(std::uint32_t slot) const { return !slots_[slot].damaged_at.empty(); }
  /// Damages a byte of the slot. Returns false if the slot is empty.
  bool damage(std::uint32_t slot);

 private:
  struct Slot {
    std::uint64_t generation = 0;
    std::vector<Stamp> stamps;
    std::vector<std::size_t> damaged_at;  // the stamps whose last bit was changed after the write
    bool is_in_frame_only = false;        // true while the chunk is copied from its frame to the slot
    bool is_lost = false;                 // true once that copy has failed
  };
  std::vector<Stamp> as_written(std::uint32_t slot) const;
  /// Returns what a block has of a cell; nothing if the engine has freed the block, or if the core leaves it out.
  std::span<Stamp> find_block(const Cell& cell, std::span<const BlockId> table, std::uint32_t position);
  /// Returns the token's stamp in its block; nullptr if there is no such block.
  Stamp* find(const Cell& cell, std::span<const BlockId> table, std::uint32_t position);
  void start_write(Slot& slot, ChunkRef chunk, const char* how);
  void advance_state(const ForwardItem& item, const Cell& cell, std::uint64_t step);
  /// Returns the first wrong cell to which the item attends; nullopt if there is none.
  std::optional<std::uint32_t> wrong_cell(const ForwardItem& item);
  void save(const SaveJob& job, std::vector<SaveDone>& done);
  void load(const LoadJob& job, StepOutcome& outcome);
  bool chance(double p) { return p > 0 && std::uniform_real_distribution<>(0, 1)(rng_) < p; }

  void unpack_ahead();
  void reached_frame(PushedSave pushed);

  std::uint32_t rank_;
  Shard shard_;
  ShardParts parts_;
  std::vector<KvGroup> groups_;
  std::vector<Cell> cells_;  // in the order of the chunk
  std::size_t rows_ = 0;     // number of stamps of the largest block in a tensor; groups share the blocks
  std::vector<std::vector<Stamp>> memory_;  // [tensor][block and row]
  std::vector<Slot> slots_;                 // stamps: [cell][stamp of the cell]
  std::unique_ptr<Frames> frames_ = std::make_unique<Frames>(0);
  std::vector<PushedSave> pushed_;
  std::map<ChunkRef, PushedSave> pushed_late_;  // pushed saves that are not in their slots yet
  /// A save of which the first layers are in its frame.
  struct Growth {
    SaveItem item;
    std::vector<Stamp> stamps;
    bool ok = false;
  };
  std::map<ChunkRef, Growth> growing_;
  std::vector<SaveItem> growths_begun_;
  std::vector<SaveDone> grown_;  // ends of growing saves that no report has told yet
  double grows_ = 0;             // probability that a pushed save grows
  double saves_early_ = 0;       // probability that a save into a frame is reported twice
  std::vector<LoadJob> ahead_;   // loads whose end was not ordered yet
  WorkerFaults faults_;
  std::uint32_t checkpoint_alignment_ = 0;
  std::mt19937_64 rng_;
};

std::uint64_t checksum_of(std::span<const Stamp> stamps);

}  // namespace kvferry::sim
