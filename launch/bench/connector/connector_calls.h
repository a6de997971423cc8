// The calls of a whole KV connector, made by vLLM's own scheduler in a Python that has it.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "transport/base/result.h"

namespace kvferry::bench {

struct ConnectorCalls {
  std::string python;  // has vLLM
  std::uint64_t tokens = 0, running = 0, repeat = 0;
};

/// kInvalidArgument: the text names something else than connectors that can be measured beside kvferry's.
Result<std::vector<std::string>> parse_connector_peers(const std::string& text);

/// The Python of `given`, else of the checkout that this program was built in, else python3.
std::string vllm_python(const std::string& given);

/// Figures by name: look-ups and steps, in microseconds. `connector`: kvferry or a peer; kvferry gets a controller of
/// its own. kUnavailable: this Python has no vLLM, or the connector doesn't load there.
Result<nlohmann::json> measure_connector_calls(const std::string& connector, const ConnectorCalls& calls,
                                               const std::function<void(const std::string&)>& say);

}  // namespace kvferry::bench
