// What tests/sim's engine takes for granted about vLLM, checked on a recorded trace of the real one.
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
  /// The next call of the trace. Throws std::runtime_error that names the rule.
  void check(const Json& call);
  /// All requests have left, every plan was reported.
  void check_end() const;

  /// How often something happened that a trace was recorded for.
  struct Tally {
    std::uint32_t steps = 0, preemptions = 0, resumptions = 0, hits = 0, aborts = 0, failed_loads = 0, async_loads = 0,
                  drafts = 0, chunked_prefills = 0, null_blocks = 0, shared_blocks = 0;
  };
  const Tally& tally() const { return tally_; }

 private:
  enum class State { kWaiting, kLoading, kRunning };
  struct Request {
    State state = State::kWaiting;
    bool was_preempted = false;  // since its last admission, and a step has told so
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
  std::map<std::string, Json> answers_;    // of this step's lookups
  std::set<std::string> resumed_unheard_;  // asked for again before a step has told of their preemption
  std::set<std::string> received_;         // asynchronous loads that ended
  std::set<std::string> drafted_;          // in the step under way
  std::uint64_t steps_ = 0, reported_ = 0;
  bool outputs_done_ = true;  // since the last step: what the model said was taken in
  std::uint64_t line_ = 1;
  Tally tally_;
};

}  // namespace kvferry::replay
