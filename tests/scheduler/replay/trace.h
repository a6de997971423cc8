// A trace of vLLM's calls to the connector, as tests/scheduler/record wrote it: one JSON object in each line, in order.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "connector/core/scheduler/scheduler_core.h"

namespace kvferry::replay {

using Json = nlohmann::json;

struct Trace {
  std::string name;
  Json config;
  std::vector<Json> calls;
};

/// Returns all traces in a folder, by name. Throws std::runtime_error if a trace can't be read.
std::vector<Trace> read_traces(const std::string& folder);

CoreConfig core_config(const Json& config);
NewRequest new_request(const Json& add, std::vector<std::int32_t>& tokens);
StepInput step_input(const Json& step);

}  // namespace kvferry::replay
