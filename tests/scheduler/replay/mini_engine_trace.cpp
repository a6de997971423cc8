// Runs scenarios on tests/sim's engine model and prints what it scheduled, for a comparison with vLLM's own scheduler.
//
// Each line of stdin is one scenario, {"config": {...}, "requests": [...], "aborts": [...]}. The program prints one
// line with the steps of each scenario. See tests/scheduler/test_mini_engine.py.
#include <fmt/format.h>

#include <iostream>
#include <nlohmann/json.hpp>
#include <string>

#include "mini_engine.h"

namespace kvferry::sim {
namespace {

using Json = nlohmann::json;

/// One run. It collects its steps as they are planned.
class Run {
 public:
  explicit Run(const Json& scenario)
      : scenario_(scenario), engine_(core_config(scenario.at("config")), engine_config(scenario.at("config")), book_) {
    engine_.on_step = [&](const StepInput& input) { planned(input); };
    engine_.on_end = [&](const std::string& id, End end, const std::vector<std::int32_t>&) {
      ended_.push_back({{"request", id}, {"aborted", end == End::kAborted}});
    };
  }

  Json steps() {
    for (std::size_t step = 0; step < 5000; ++step) {
      const bool more = act(step);
      if (engine_.num_unfinished() == 0 && ended_.empty()) {
        if (!more) return std::move(steps_);
        continue;
      }
      engine_.step(now_ += kMillisecond);
      engine_.take_actions();
    }
    throw Broken("still busy after 5000 steps");
  }

 private:
  static CoreConfig core_config(const Json& from) {
    CoreConfig config;
    config.fingerprint = "compared";
    config.chunk_tokens = from.at("chunk_tokens");
    config.groups = {{from.at("block_tokens")}};
    config.num_slots = from.at("num_slots");
    config.save_decode_cache = from.at("save_decode_cache");
    config.save_partial_chunks = from.at("save_partial_chunks");
    return config;
  }
  static EngineConfig engine_config(const Json& from) {
    EngineConfig config;
    config.num_blocks = from.at("num_blocks");
    config.token_budget = from.at("token_budget");
    config.max_running = from.at("max_running");
    config.prefix_caching = from.at("prefix_caching");
    config.uncached_first = true;
    config.reserves_whole = from.at("reserve_full_prompt");
    config.delivers = from.at("role") != "kv_consumer";
    config.async = from.at("async");
    return config;
  }

  /// Does what clients do before the step. Returns false if they will do nothing more.
  bool act(std::size_t step) {
    bool more = false;
    for (const Json& request : scenario_.at("requests")) {
      if (request.at("at") == step) {
        RequestSpec spec;
        spec.id = request.at("id");
        spec.prompt = request.at("prompt").get<std::vector<std::int32_t>>();
        spec.max_tokens = request.at("max_tokens");
        engine_.add(spec, now_);
      }
      more |= request.at("at") > step;
    }
    for (const Json& abort : scenario_.at("aborts")) {
      if (abort.at("at") == step) engine_.abort(abort.at("id"), now_);
      more |= abort.at("at") > step;
    }
    return more;
  }

  void planned(const StepInput& input) {
    for (Json& ended : ended_) {
      Json& admissions = ended["admissions"] = Json::array();
      for (const Admission& admission : engine_.finished().at(ended.at("request")).admissions)
        admissions.push_back({{"hit", admission.hit},
                              {"local", admission.local},
                              {"to_load", admission.to_load},
                              {"resumed", admission.resumed}});
    }
    Json row = {{"scheduled", Json::array()}, {"preempted", Json::array()}, {"ended", std::exchange(ended_, {})}};
    for (const ScheduledRequest& scheduled : input.scheduled) {
      row["scheduled"].push_back({{"request", scheduled.id.value},
                                  {"computed", scheduled.num_computed},
                                  {"scheduled", scheduled.num_scheduled},
                                  {"blocks", scheduled.block_ids ? Json(*scheduled.block_ids) : Json()}});
    }
    for (const RequestId& id : input.preempted) row["preempted"].push_back(id.value);
    steps_.push_back(std::move(row));
  }

  const Json& scenario_;
  StampBook book_;
  MiniEngine engine_;
  TimeNs now_ = kSecond;
  std::vector<Json> ended_;  // requests that ended since the last step
  Json steps_ = Json::array();
};

}  // namespace
}  // namespace kvferry::sim

int main() {
  for (std::string line; std::getline(std::cin, line);) {
    try {
      const auto scenario = nlohmann::json::parse(line);
      kvferry::sim::Run run(scenario);
      std::cout << run.steps().dump() << std::endl;
    } catch (const std::exception& error) {
      std::cout << nlohmann::json{{"error", error.what()}}.dump() << std::endl;
    }
  }
  return 0;
}
