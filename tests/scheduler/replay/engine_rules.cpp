#include "engine_rules.h"

#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>

namespace kvferry::replay {

EngineRules::EngineRules(const Trace& trace)
    : name_(trace.name),
      block_tokens_(trace.config.at("block_tokens")),
      token_budget_(trace.config.at("token_budget")),
      num_blocks_(trace.config.at("num_blocks")),
      async_(trace.config.at("runs_ahead")),
      windows_(trace.config.at("windows").get<std::vector<std::uint32_t>>()) {}

void EngineRules::fail(const std::string& rule) const {
  throw std::runtime_error(fmt::format("{}, line {}: {}", name_, line_, rule));
}

EngineRules::Request& EngineRules::known(const Json& call) {
  const auto found = requests_.find(call.at("request"));
  if (found == requests_.end()) fail(fmt::format("request {} was never added", call.at("request").dump()));
  return found->second;
}

void EngineRules::check(const Json& call) {
  line_ += 1;
  const std::string kind = call.at("call");
  if (kind == "add") {
    Request request;
    request.num_tokens = static_cast<std::uint32_t>(call.at("tokens").size());
    if (!requests_.emplace(call.at("request"), request).second) fail("a request is added twice");
  } else if (kind == "tokens") {
    Request& request = known(call);
    if (call.at("keep") != request.num_tokens) fail("tokens are taken back");
    request.num_tokens += static_cast<std::uint32_t>(call.at("new").size());
  } else if (kind == "vllm_match") {
    match(call);
  } else if (kind == "lookup") {
    lookup(call);
  } else if (kind == "allocated") {
    allocated(call);
  } else if (kind == "step") {
    step(call);
  } else if (kind == "vllm_step") {
    std::uint32_t sum = 0;
    for (const auto& [id, count] : call.at("counts").items()) sum += count.get<std::uint32_t>();
    if (sum > token_budget_) fail("more tokens than the budget");
    drafted_.clear();
    for (const auto& [id, count] : call.at("speculative").items()) drafted_.insert(id);
    tally_.drafts += static_cast<std::uint32_t>(drafted_.size());
  } else if (kind == "vllm_finished") {
    if (call.at("holds") == true) fail("blocks are held after the end");
    if (call.at("status") == "FINISHED_ABORTED") {
      tally_.aborts += 1;
    } else if (outputs_done_ && !async_) {
      fail("a request ends by itself after the outputs of its step were taken in");
    }
  } else if (kind == "finished") {
    known(call);
    requests_.erase(call.at("request"));
    resumed_unheard_.erase(call.at("request"));
  } else if (kind == "vllm_output") {
    for (const Json& id : call.at("received")) received_.insert(id);
    const bool failed = !call.at("bad_blocks").empty() || !call.at("failed").empty();
    tally_.failed_loads += failed ? 1 : 0;
    for (const Json& id : call.at("failed")) {  // the request starts again with a lookup
      received_.erase(id);
      if (const auto found = requests_.find(id); found != requests_.end()) found->second.state = State::kWaiting;
    }
    if (failed)
      for (auto& [id, request] : requests_) request.next_computed.reset();
    outputs_done_ = true;
  } else if (kind == "report") {
    // Reports come in the order of the steps, and at most one step late.
    const std::uint64_t step = call.at("step");
    if (step <= reported_ || step > steps_ || step + (async_ ? 1 : 0) < steps_)
      fail(fmt::format("a report of step {} after those of {}, with {} planned", step, reported_, steps_));
    reported_ = step;
    if (!outputs_done_) fail("a report comes before the outputs of its step");
  }
}

void EngineRules::match(const Json& call) {
  Request& request = known(call);
  if (request.state == State::kLoading) fail("a lookup while a load is under way");
  if (call.at("local").get<std::uint32_t>() % block_tokens_ != 0) fail("a local hit that ends inside a block");
  if (call.at("local").get<std::uint32_t>() >= call.at("num_tokens").get<std::uint32_t>())
    fail("a local hit that leaves nothing to compute");
  const std::string status = call.at("status");
  const bool resumes = call.at("preemptions").get<std::uint32_t>() > 0;
  if (status != (resumes ? "PREEMPTED" : "WAITING")) fail(fmt::format("a lookup of a request that is {}", status));
  if (request.state == State::kRunning) {
    // The request has lost its blocks since the last step. The next step has to report the preemption.
    if (!resumes) fail("a lookup of a request that runs");
    resumed_unheard_.insert(call.at("request"));
    request.state = State::kWaiting;
  }
}

void EngineRules::lookup(const Json& call) {
  answers_[call.at("request")] = call;
  if (call.at("answer").is_number() && call.at("answer") > 0) tally_.hits += 1;
}

void EngineRules::allocated(const Json& call) {
  Request& request = known(call);
  const std::string id = call.at("request");
  const std::uint32_t external = call.at("external");
  const auto table = call.at("blocks").get<BlockTable>();
  if (request.state == State::kLoading) {
    if (!received_.erase(id)) fail("a load is allocated for again before it ended");
    if (external != 0) fail("tokens are loaded twice");
  } else {
    const auto answer = answers_.find(id);
    if (answer == answers_.end()) fail("an allocation without a lookup in its step");
    if (answer->second.at("answer").is_null()) fail("an allocation after 'ask again'");
    if (external > answer->second.at("answer").get<std::uint32_t>()) fail("more is allocated than was answered");
    check_sharing(id, table, answer->second.at("local"));
    tally_.resumptions += request.was_preempted || resumed_unheard_.contains(id) ? 1 : 0;
    if (external > 0 && answer->second.at("async") == true) {
      request.state = State::kLoading;
      request.table = table;
      tally_.async_loads += 1;
      return;
    }
    request.next_computed = answer->second.at("local").get<std::uint32_t>() + external;
  }
  if (request.state == State::kLoading) request.next_computed.reset();
  request.state = State::kRunning;
  request.was_preempted = false;
  request.table = table;
}

void EngineRules::step(const Json& call) {
  steps_ += 1;
  tally_.steps += 1;
  if (call.at("plan").at("step") != steps_) fail("a step is missing");
  for (const Json& id : call.at("preempted")) {
    const auto found = requests_.find(id);
    if (found == requests_.end()) continue;  // the request has ended since
    tally_.preemptions += 1;
    if (resumed_unheard_.erase(id) == 0) {
      if (found->second.state != State::kRunning) fail("a request is preempted that has no blocks");
      found->second.state = State::kWaiting;
    }
    found->second.was_preempted |= found->second.state == State::kWaiting;
  }
  if (!resumed_unheard_.empty()) fail("a request was looked up again, and no step says that it was preempted");
  for (const Json& told : call.value("tokens", Json::array()))
    known(told).num_tokens = told.at("keep").get<std::uint32_t>() + static_cast<std::uint32_t>(told.at("new").size());
  for (const Json& row : call.at("scheduled")) scheduled(row);
  answers_.clear();
  outputs_done_ = call.at("scheduled").empty();
}

void EngineRules::scheduled(const Json& row) {
  const std::string id = row.at("request");
  const auto found = requests_.find(id);
  if (found == requests_.end()) fail("a request is scheduled that was never added");
  Request& request = found->second;
  if (request.state != State::kRunning) fail(fmt::format("{} is scheduled without having been allocated", id));
  const std::uint32_t computed = row.at("computed"), count = row.at("scheduled");
  if (count == 0) fail("nothing is scheduled of a request");
  if (request.next_computed && *request.next_computed != computed)
    fail(fmt::format("{} is computed up to {}, not {}", id, computed, *request.next_computed));
  if (computed + count < request.num_tokens) tally_.chunked_prefills += 1;
  request.next_computed = computed + count;
  if (drafted_.contains(id)) request.next_computed.reset();  // some of the drafts may be rejected
  if (!row.at("blocks").is_null()) {
    const auto table = row.at("blocks").get<BlockTable>();
    check_table(id, table, request.table);
    request.table = table;
  }
  for (std::size_t group = 0; group < request.table.size(); ++group)
    if (request.table[group].size() * block_tokens_ < computed + count) fail(fmt::format("{} has too few blocks", id));
}

/// Checks a whole table after a change: earlier blocks stay, except that blocks outside of a window may become the null
/// block.
void EngineRules::check_table(const std::string& id, const BlockTable& table, const BlockTable& before) {
  if (table.size() != windows_.size()) fail("a table for another number of KV groups");
  for (std::size_t group = 0; group < table.size(); ++group) {
    std::set<BlockId> seen;
    for (std::size_t i = 0; i < table[group].size(); ++i) {
      const BlockId block = table[group][i];
      if (block == kNullBlock) {
        if (windows_[group] == 0) fail(fmt::format("{} has a null block without a window", id));
        tally_.null_blocks += 1;
        continue;
      }
      if (block < 0 || static_cast<std::uint32_t>(block) >= num_blocks_ || !seen.insert(block).second)
        fail(fmt::format("{} has block {} twice, or it does not exist", id, block));
      if (i < before[group].size() && before[group][i] != block) fail(fmt::format("{} got another block {}", id, i));
    }
    if (table[group].size() < before[group].size()) fail(fmt::format("{} lost blocks", id));
  }
}

/// Checks that requests share blocks only where they had a local hit.
void EngineRules::check_sharing(const std::string& id, const BlockTable& table, std::uint32_t local) const {
  for (std::size_t group = 0; group < table.size(); ++group) {
    // a block that has left a window may be given to another request, and no step reports this
    if (windows_[group] > 0) continue;
    for (std::size_t i = local / block_tokens_; i < table[group].size(); ++i) {
      const BlockId block = table[group][i];
      if (block == kNullBlock) continue;
      for (const auto& [other, request] : requests_) {
        if (other == id || request.state == State::kWaiting || resumed_unheard_.contains(other)) continue;
        const std::vector<BlockId>& blocks = request.table[group];
        if (std::find(blocks.begin(), blocks.end(), block) != blocks.end())
          fail(fmt::format("{} is given block {}, which {} has", id, block, other));
      }
    }
  }
}

void EngineRules::check_end() const {
  if (!requests_.empty()) fail(fmt::format("{} requests are left", requests_.size()));
}

}  // namespace kvferry::replay
