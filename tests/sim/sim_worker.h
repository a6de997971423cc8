// One rank: engine memory and pool memory made of stamps. Executes a step's plan in the order that plan.h documents.
#pragma once

#include <optional>
#include <random>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "connector/core/peer_wire.h"
#include "connector/core/plan.h"
#include "connector/core/request_state.h"
#include "sim_text.h"

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
  std::set<BlockId> bad_blocks;  // whose load failed
  std::vector<bool> garbage;     // [item]: attended to a failed load, directly or through others' KV
};

class Worker {
 public:
  Worker(std::uint32_t rank, std::uint32_t num_blocks, std::uint32_t block_tokens, std::uint32_t num_slots,
         std::uint64_t seed, std::vector<std::uint32_t> windows = {0});
  void set_faults(WorkerFaults faults) { faults_ = faults; }

  /// Throws Broken when a request attends to a wrong cell, unless a load failed that the engine has not heard of yet.
  StepOutcome execute(const StepPlan& plan, const std::vector<ForwardItem>& forward, bool failure_unheard);
  /// The engine's memory is gone, as in its sleep; the pool's stays.
  void wipe_cells();

  /// What a peer's one-sided read would get now, whatever lies there; nothing where there is no such slot.
  std::vector<Stamp> read_slot(std::uint32_t slot) const;
  /// One pulled chunk: kept when it matches the holder's checksum. Returns that.
  bool write_pulled(const PullItem& item, const std::vector<Stamp>& bytes);
  /// A slot's stamps of the first KV group, as of rank 0.
  std::vector<Stamp> plain(std::uint32_t slot) const;
  std::uint64_t slot_checksum(std::uint32_t slot) const;
  std::uint64_t generation(std::uint32_t slot) const { return slots_[slot].generation; }
  /// Somebody damaged its bytes since they were written.
  bool damaged(std::uint32_t slot) const { return slots_[slot].damaged; }
  /// Damages some byte of the slot; false where it is empty.
  bool damage(std::uint32_t slot);

 private:
  struct Slot {
    std::uint64_t generation = 0;
    std::vector<Stamp> stamps;
    bool damaged = false;
  };
  Stamp mask(std::size_t group) const { return rank_mask_ ^ (group * 0x3333333333333333ULL); }
  Stamp* cell(std::span<const BlockId> table, std::uint32_t position);
  std::uint32_t first_attended(std::size_t group, std::uint32_t position) const;
  /// The first cell that the item attends to and that is wrong; nullopt: none is.
  std::optional<std::uint32_t> wrong_cell(const ForwardItem& item);
  void save(const SaveJob& job, std::vector<SaveDone>& done);
  void load(const LoadJob& job, StepOutcome& outcome);
  bool chance(double p) { return p > 0 && std::uniform_real_distribution<>(0, 1)(rng_) < p; }

  std::uint32_t rank_;
  std::uint32_t block_tokens_;
  Stamp rank_mask_;  // a rank's KV differs from every other rank's
  std::vector<std::uint32_t> windows_;
  std::vector<Stamp> cells_;
  std::vector<Slot> slots_;
  WorkerFaults faults_;
  std::mt19937_64 rng_;
};

std::uint64_t checksum_of(std::span<const Stamp> stamps);

}  // namespace kvferry::sim
