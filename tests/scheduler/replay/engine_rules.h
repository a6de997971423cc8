// The assumptions of tests/sim's engine about vLLM, checked on a recorded trace of the real vLLM.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "trace.h"

namespace kvferry::replay {

class EngineRules {
 public:
  explicit EngineRules(const Trace& trace);
  /// Checks the next call of the trace. Throws std::runtime_error with the name of the broken rule.
  void check(const Json& call);
  /// Checks that all requests have ended, and that every plan was reported.
  void check_end() const;

  /// Counts the events for which a trace was recorded.
  struct Tally {
    std::uint32_t steps = 0, preemptions = 0, resumptions = 0, hits = 0, aborts = 0, failed_loads = 0, async_loads = 0,
                  drafts = 0, chunked_prefills = 0, null_blocks = 0, shared_blocks = 0;
  };
  const Tally& tally() const { return tally_; }

 private:
  enum class State { kWaiting, kLoading, kRunning };
  struct Request {
    State state = State::kWaiting;
    bool was_preempted = false;  // since the last admission, and a step has reported it
    std::uint32_t num_tokens = 0;
    std::optional<std::uint32_t> next_computed;  // unknown after drafts or a failed load
    BlockTable table;
  };

  void match(const Json& call);
  void lookup(const Json& call);
  void allocated(const Json& call);
  void step(const Json& call);
  void scheduled(const Json& row);
  void check_table(const std::string& id, const BlockTable& table, const BlockTable& before);
  void check_sharing(const std::string& id, const BlockTable& table, std::uint32_t local) const;
  Request& known(const Json& call);
  void fail(const std::string& rule) const;

  std::string name_;
  std::uint32_t block_tokens_, token_budget_, num_blocks_;
  bool async_;
  std::vector<std::uint32_t> windows_;
  std::map<std::string, Request> requests_;
  std::map<std::string, Json> answers_;  // answers to the lookups of this step
  // preempted requests that were looked up again before a step reported their preemption
  std::set<std::string> resumed_unheard_;
  std::set<std::string> received_;  // requests whose asynchronous load has ended
  std::set<std::string> drafted_;   // requests with drafts in the current step
  std::uint64_t steps_ = 0, reported_ = 0;
  bool outputs_done_ = true;  // vLLM has processed the outputs since the last step
  std::uint64_t line_ = 1;
  Tally tally_;
};

}  // namespace kvferry::replay
