// How requests come to the engine, and what becomes of them when the weights change.
#include <fmt/format.h>

#include <span>
#include <utility>

#include "mini_engine.h"
#include "schedule_log.h"

namespace kvferry::sim {

std::string extras_of(const RequestSpec& spec, std::uint32_t weights) {
  return weights == 0 ? spec.extras : fmt::format("{};epoch={}", spec.extras, weights);
}

void MiniEngine::add(const RequestSpec& spec, TimeNs now) {
  if (requests_.contains(spec.id)) throw Broken(fmt::format("the simulator uses id {} twice", spec.id));
  Request request;
  request.spec = spec;
  request.epoch = ++last_epoch_;
  request.text.tokens = spec.prompt;
  request.known = request.sampled = static_cast<std::uint32_t>(spec.prompt.size());
  request.table.resize(blocks_.groups().size());
  go_on(request);
  tell("request {}: {} tokens, says {}", spec.id, request.known, request.end - request.known);
  tell_request(request, now);
  tally_.requests += 1;
  const std::vector<KvGroup>& groups = blocks_.groups();
  tally_.several_groups += groups.size() > 1;
  tally_.unlike_blocks += groups.front().block_tokens != groups.back().block_tokens;
  tally_.unlike_windows += groups.size() > 2 && groups[1].window != groups[2].window;
  tally_.whole_blocks += whole_blocks_;
  tally_.restarting_windows += groups.back().window_restarts;
  tally_.uncacheable += !spec.cacheable;
  tally_.salted += !spec.salt.empty();
  tally_.ids_again += finished_.erase(spec.id);
  rekeyed_.erase(spec.id);
  outputs_[spec.id].clear();
  first_admitted_.erase(spec.id);
  requests_.emplace(spec.id, std::move(request));
  waiting_.push_back(spec.id);
}

/// Determines what the model says after the request's known tokens, with the weights that it has now.
void MiniEngine::go_on(Request& request) {
  const std::string extras = extras_of(request.spec, weights_);
  const std::vector<std::int32_t> known(request.text.tokens.begin(), request.text.tokens.begin() + request.known);
  request.text = say(known, most(request) + config_.num_drafts + 1 - request.known, false, extras);
  request.end = most(request);
  for (std::uint32_t p = request.known; request.spec.stops && p < request.end; ++p)
    if (is_stop(request.text.tokens[p])) request.end = p + 1;
  book_.learn(request.text, extras);
}

void MiniEngine::tell_request(Request& request, TimeNs now) {
  request.reported_loads.clear();  // the core counts the attempts of what it takes for a new request anew
  const RequestSpec& spec = request.spec;
  NewRequest added;
  added.id = RequestId{spec.id};
  added.tokens.assign(request.text.tokens.data(), request.text.tokens.data() + request.known);
  added.num_prompt_tokens = static_cast<std::uint32_t>(spec.prompt.size());
  added.extras = extras_of(spec, weights_);
  added.cache_salt = spec.salt;
  added.cacheable = spec.cacheable;
  added.handoff = spec.handoff;
  added.source = spec.source;
  added.push_to = spec.push_to;
  added.prepares = spec.prepares;
  core_.add_request(added, now);
}

void MiniEngine::update_weights(TimeNs now) {
  if (!holding_.empty() || !held_back_.empty()) return;
  weights_ += 1;
  tell("  has weights {}", weights_);
  tally_.weight_updates += 1;
  preempt_all();
  core_.reset_cache();
  for (auto& [id, request] : requests_) {
    tally_.rekeyed += 1;
    rekeyed_.insert(id);
    request.epoch = ++last_epoch_;  // vLLM drops the outputs of steps with the former weights
    request.spec.source.reset();    // the prompt was handed over with the former weights
    go_on(request);
    if (!std::exchange(request.is_dropped, true))
      core_.finished(RequestId{id}, 0, BlockTable(blocks_.groups().size()), true, now);
    request.pending_since.reset();  // the core waits for the new keys anew
  }
}

}  // namespace kvferry::sim
