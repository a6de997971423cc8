// The connector's promises, asserted after every step of every simulated engine from what can be seen of its core, and
// named when one is broken. What needs the KV itself is asserted by the workers (sim_worker.h: attended cells, slots)
// and by the network (sim_pull.cpp: reads under a lease, doubled answers).
//
// idempotent-lookup  asked_again()       exactly-once   ended(), and the core's own checks of reports
// exact-load         plan_built()        bounded-hold   lookup_answered(), plan_built(), after_step()
// no-stale-spec      plan_built()        sane-counts    lookup_answered(), after_step(), ended()
// saved-is-computed  save_planned()      verified-only  offered()
// fenced-reuse       plan_built()        no-engine-death  promise_of(): any other exception out of the core
// purged-is-gone     after_step(), and the core's own check of each chunk that it offers
// fair-eviction      after_step(), and the core's own check of each eviction for another chunk
#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "connector/core/scheduler/scheduler_core.h"

namespace kvferry::sim {

/// An allocation with external tokens, as the engine knows it.
struct AdmittedLoad {
  std::string id;
  std::uint32_t local = 0, external = 0;
  BlockTable table;
  bool prepares = false;  // a preparation, which is loaded asynchronously in every engine
};

/// What the workers' reports say about a load. `loaded` is the lowest number of all ranks.
struct ReportedLoad {
  std::uint32_t loaded = std::numeric_limits<std::uint32_t>::max();
  bool found_damage = false;
};

class PromisesCheck {
 public:
  explicit PromisesCheck(const CoreConfig& config) : config_(config) {}

  /// pending_for: how long the lookups of this attempt have been answered with "ask again".
  void lookup_answered(const std::string& id, std::uint32_t num_local, const Answer& answer, std::uint32_t num_tokens,
                       TimeNs pending_for) const;
  /// Compares the answers to the same lookup, made twice in a row. The two numbers of pins were counted before and
  /// after the second lookup.
  void asked_again(const std::string& id, const Answer& first, const Answer& again, std::size_t holds_before,
                   std::size_t holds_after) const;
  /// in_flight: the plans whose report has not come yet, including the new plan.
  void plan_built(const SchedulerCore& core, std::span<const AdmittedLoad> admitted,
                  std::span<const StepPlan* const> in_flight, std::span<const ChunkRef> late_saves = {}) const;
  /// Checks a save of a request that has, or had in the step before, the KV of `computed` tokens in the blocks of
  /// `table`.
  void save_planned(const SaveJob& job, const BlockTable& table, std::uint32_t computed, std::uint32_t known) const;
  /// loads_in_flight: number of load jobs whose report the core has not received.
  void after_step(const SchedulerCore& core, std::size_t loads_in_flight, TimeNs now);
  /// loads: by attempt, the loads for which the core has all reports. was_known: the engine had not ended the request
  /// before.
  void ended(const std::string& id, const FinishedRequest& done, const std::map<std::uint32_t, ReportedLoad>& loads,
             bool was_known) const;
  /// Checks the answer of the core to a lease request.
  static void offered(const SchedulerCore& core, const LeaseReply& reply, const LeaseRequest& request);
  /// Throws Broken if anything is still held, written or waited for. Must be called after all deadlines have passed.
  static void idle(const SchedulerCore& core);

 private:
  void check_load(const SchedulerCore& core, const AdmittedLoad& admitted, const LoadJob& job) const;

  CoreConfig config_;
  CoreCounters last_;
};

/// Returns the promise that the message of a failure names. If it names none, returns no-engine-death, because the core
/// failed by itself.
std::string promise_of(const std::string& message);

}  // namespace kvferry::sim
