// One rank: engine memory and pool memory made of stamps. Executes a step's plan in the order that plan.h documents.
#pragma once

#include <random>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "connector/core/peer_wire.h"
#include "connector/core/plan.h"
#include "sim_text.h"

namespace kvferry::sim {

/// What goes wrong in the workers, each with its probability.
struct WorkerFaults {
  double save_fails = 0;
  double corrupts_load = 0;  // a slot that is about to be loaded is damaged first
};

/// One request's share of a forward: tokens [first, first + num) are computed, all of [0, first + num) attended.
struct ForwardItem {
  std::string request_id;
  const std::vector<Stamp>* stamps = nullptr;  // the truth
  std::vector<BlockId> table;
  std::uint32_t first = 0;
  std::uint32_t num = 0;
};

struct StepOutcome {
  WorkerReport report;
  std::set<BlockId> bad_blocks;  // whose load failed
  std::vector<bool> garbage;     // [item]: attended to a failed load, directly or through others' KV
};

class Worker {
 public:
  Worker(std::uint32_t rank, std::uint32_t num_blocks, std::uint32_t block_tokens, std::uint32_t num_slots,
         std::uint64_t seed);
  void set_faults(WorkerFaults faults) { faults_ = faults; }

  /// Throws Broken when a request attends to a wrong cell, unless a load failed that the engine has not heard of yet.
  StepOutcome execute(const StepPlan& plan, const std::vector<ForwardItem>& forward, bool failure_unheard);

  /// What a peer's one-sided read would get now, whatever lies there.
  std::vector<Stamp> read_slot(std::uint32_t slot) const { return slots_[slot].stamps; }
  /// One pulled chunk: kept when it matches the holder's checksum. Returns that.
  bool write_pulled(const PullItem& item, const std::vector<Stamp>& bytes);
  /// A slot's stamps as of rank 0.
  std::vector<Stamp> plain(std::uint32_t slot) const;
  /// Somebody damaged its bytes since they were written.
  bool damaged(std::uint32_t slot) const { return slots_[slot].damaged; }

 private:
  struct Slot {
    std::uint64_t generation = 0;
    std::vector<Stamp> stamps;
    bool damaged = false;
  };
  Stamp& cell(std::span<const BlockId> table, std::uint32_t position);
  void save(const SaveJob& job, std::vector<SaveDone>& done);
  void load(const LoadJob& job, StepOutcome& outcome);
  bool chance(double p) { return p > 0 && std::uniform_real_distribution<>(0, 1)(rng_) < p; }

  std::uint32_t rank_;
  std::uint32_t block_tokens_;
  Stamp mask_;  // a rank's KV differs from every other rank's
  std::vector<Stamp> cells_;
  std::vector<Slot> slots_;
  WorkerFaults faults_;
  std::mt19937_64 rng_;
};

std::uint64_t checksum_of(std::span<const Stamp> stamps);

}  // namespace kvferry::sim
