// The connector's promises, asserted after every step of every simulated engine from what can be seen of its core, and
// named when one is broken. What needs the KV itself is asserted by the workers (sim_worker.h: attended cells, slots)
// and by the network (sim_network.cpp: reads under a lease, doubled answers).
//
// idempotent-lookup  asked_again()       exactly-once   ended(), and the core's own checks of reports
// exact-load         plan_built()        bounded-hold   lookup_answered(), plan_built(), after_step()
// no-stale-spec      plan_built()        sane-counts    lookup_answered(), after_step(), ended()
// saved-is-computed  save_planned()      verified-only  offered()
// fenced-reuse       plan_built()        no-engine-death  promise_of(): any other exception out of the core
#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "connector/core/scheduler/scheduler_core.h"

namespace kvferry::sim {

/// An allocation with external tokens, as the engine sees it.
struct AdmittedLoad {
  std::string id;
  std::uint32_t local = 0, external = 0;
  BlockTable table;
};

/// What the workers' reports said of a load: the least that any rank loaded.
struct ReportedLoad {
  std::uint32_t loaded = std::numeric_limits<std::uint32_t>::max();
  bool found_damage = false;
};

class PromisesCheck {
 public:
  explicit PromisesCheck(const CoreConfig& config) : config_(config) {}

  /// pending_for: how long the attempt has been told to ask again.
  void lookup_answered(const std::string& id, std::uint32_t num_local, const Answer& answer, std::uint32_t num_tokens,
                       TimeNs pending_for) const;
  /// The same lookup, asked twice in a row; the number of holds before and after the second time.
  void asked_again(const std::string& id, const Answer& first, const Answer& again, std::size_t holds_before,
                   std::size_t holds_after) const;
  /// in_flight: plans that no report has come for, the new one included.
  void plan_built(const SchedulerCore& core, std::span<const AdmittedLoad> admitted,
                  std::span<const StepPlan* const> in_flight) const;
  /// A save of a request that has, or in the step before had, `computed` tokens' KV in the blocks of `table`.
  void save_planned(const SaveJob& job, const BlockTable& table, std::uint32_t computed, std::uint32_t known) const;
  /// loads_in_flight: load jobs whose report the core has not got.
  void after_step(const SchedulerCore& core, std::size_t loads_in_flight, TimeNs now);
  /// loads: by attempt, those that the core has all reports of. was_known: the engine had not ended it before.
  void ended(const std::string& id, const FinishedRequest& done, const std::map<std::uint32_t, ReportedLoad>& loads,
             bool was_known) const;
  /// A lease that the core gives out.
  static void offered(const SchedulerCore& core, const LeaseReply& reply, std::size_t num_keys);
  /// Throws Broken unless nothing is held, written or waited for. Call when every deadline has passed.
  static void idle(const SchedulerCore& core);

 private:
  void check_load(const SchedulerCore& core, const AdmittedLoad& admitted, const LoadJob& job) const;

  CoreConfig config_;
  CoreCounters last_;
};

/// The promise that a failure's message names; no-engine-death where it names none: the core gave up.
std::string promise_of(const std::string& message);

}  // namespace kvferry::sim
