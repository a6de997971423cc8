// One rank: engine memory and pool memory made of stamps. Executes a step's plan in the order that plan.h documents.
#pragma once

#include <algorithm>
#include <optional>
#include <random>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "connector/core/peer_wire.h"
#include "connector/core/plan.h"
#include "connector/core/scheduler/request_state.h"
#include "sim_text.h"
#include "transport/base/shard_map.h"

namespace kvferry::sim {

/// What goes wrong in the workers, each with its probability.
struct WorkerFaults {
  double save_fails = 0;
  double corrupts_load = 0;  // a slot that is about to be loaded is damaged first
};

/// One request's share of a forward: tokens [first, first + num) are computed, all before them attended, in a group
/// with a window only the last of them.
struct ForwardItem {
  std::string request_id;
  const std::vector<Stamp>* stamps = nullptr;  // the truth
  std::vector<Stamp> drafts;                   // of the tokens from first_draft on, which may be wrong ones
  std::uint32_t first_draft = 0;
  BlockTable table;
  std::uint32_t first = 0;
  std::uint32_t num = 0;
  std::uint32_t loaded_from = 0, loaded_to = 0;  // by kvferry in this admission, to name the promise

  Stamp stamp(std::uint32_t p) const {
    return !drafts.empty() && p >= first_draft ? drafts.at(p - first_draft) : stamps->at(p);
  }
};

struct StepOutcome {
  WorkerReport report;
  std::set<BlockId> bad_blocks;  // whose load failed, of loads that the engine doesn't wait for
  std::vector<bool> async_ok;    // [load of the plan that the engine waits for]: all of it is there
  std::vector<bool> garbage;     // [item]: attended to a failed load, directly or through others' KV
};

/// A save whose chunk goes to another node as well.
struct PushedSave {
  std::uint64_t push = 0;
  std::uint32_t index = 0;
  ChunkRef chunk;
  bool ok = false;
  std::uint64_t checksum = 0;
};

class Worker {
 public:
  /// What lies in a slot into which a chunk was pushed under another chunk's key.
  static std::vector<Stamp> forged() { return {0xf00}; }
  /// A node of another shape makes its chunk of several runs, each of them a forged one.
  bool is_forged(std::uint32_t slot) const {
    const std::vector<Stamp> stamps = as_written(slot);
    return !stamps.empty() && std::ranges::count(stamps, forged()[0]) == std::ssize(stamps);
  }
  /// `shard`: of the model; what differs from layer to layer and from head to head is the KV's mask.
  Worker(std::uint32_t rank, Shard shard, std::uint32_t num_blocks, std::uint32_t block_tokens, std::uint32_t num_slots,
         std::uint64_t seed, std::vector<std::uint32_t> windows = {0});
  void set_faults(WorkerFaults faults) { faults_ = faults; }
  void set_checkpoints(std::uint32_t alignment) { checkpoint_alignment_ = alignment; }

  /// Throws Broken when a request attends to a wrong cell, unless a load failed that the engine has not heard of yet.
  StepOutcome execute(const StepPlan& plan, const std::vector<ForwardItem>& forward, bool failure_unheard);
  /// The engine's memory is gone, as in its sleep; the pool's stays.
  void wipe_cells();

  /// What a peer's one-sided read would get now, whatever lies there; nothing where there is no such slot.
  std::vector<Stamp> read_slot(std::uint32_t slot) const;
  /// Writes a pulled chunk if it matches the holder's checksum. Returns whether it does.
  bool write_pulled(const PullItem& item, const std::vector<Stamp>& bytes);
  /// Another node writes into a slot that was granted to it.
  void write_pushed(ChunkRef local, const std::vector<Stamp>& bytes);
  /// Since the last call.
  std::vector<PushedSave> take_pushed() { return std::exchange(pushed_, {}); }
  /// The same for one that was put together from runs, each of which matches its checksum; returns its own.
  std::uint64_t write_runs(const PullItem& item, const std::vector<Stamp>& bytes);
  /// Stamps that a chunk of so many tokens has in one cell of the shard.
  std::size_t cell_stamps(std::uint32_t num_tokens) const { return num_tokens * windows_.size(); }
  const Shard& shard() const { return shard_; }
  /// A slot's stamps of the first cell and KV group as they were written, before any damage, unmasked.
  std::vector<Stamp> plain(std::uint32_t slot) const;
  /// Of the slot's stamps as they were written, before any damage.
  std::uint64_t slot_checksum(std::uint32_t slot) const;
  std::uint64_t generation(std::uint32_t slot) const { return slots_[slot].generation; }
  /// The slot's bytes were damaged since they were written.
  bool damaged(std::uint32_t slot) const { return !slots_[slot].damaged_at.empty(); }
  /// Damages some byte of the slot; false where it is empty.
  bool damage(std::uint32_t slot);

 private:
  struct Slot {
    std::uint64_t generation = 0;
    std::vector<Stamp> stamps;
    std::vector<std::size_t> damaged_at;  // stamps whose last bit was changed since
  };
  std::vector<Stamp> as_written(std::uint32_t slot) const;
  Stamp mask(std::size_t cell, std::size_t group) const;
  /// nullptr: the engine has given the block up, or the core leaves it out.
  Stamp* find(std::size_t cell, std::span<const BlockId> table, std::uint32_t position);
  void start_write(Slot& slot, ChunkRef chunk, const char* how);
  std::uint32_t first_attended(std::size_t group, std::uint32_t position) const;
  void advance_state(const ForwardItem& item, std::size_t group, std::uint64_t step);
  /// The first cell that the item attends to and that is wrong; nullopt: none is.
  std::optional<std::uint32_t> wrong_cell(const ForwardItem& item);
  void save(const SaveJob& job, std::vector<SaveDone>& done);
  void load(const LoadJob& job, StepOutcome& outcome);
  bool chance(double p) { return p > 0 && std::uniform_real_distribution<>(0, 1)(rng_) < p; }

  std::uint32_t rank_;
  Shard shard_;
  std::size_t num_cells_;
  std::uint32_t block_tokens_;
  std::vector<std::uint32_t> windows_;
  std::vector<std::vector<Stamp>> memory_;  // [cell][block and row]
  std::vector<Slot> slots_;                 // stamps: [cell][group][token]
  std::vector<PushedSave> pushed_;
  WorkerFaults faults_;
  std::uint32_t checkpoint_alignment_ = 0;
  std::mt19937_64 rng_;
};

std::uint64_t checksum_of(std::span<const Stamp> stamps);

}  // namespace kvferry::sim
