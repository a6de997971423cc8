// Measures the calls of vLLM's scheduler to a KV connector (kvferry's or another one) in a Python that has vLLM.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "launch/bench/harness/programs.h"

namespace kvferry::bench {

struct ConnectorCalls {
  std::string python;  // interpreter that has vLLM
  std::uint64_t tokens = 0, running = 0, repeat = 0;
};

constexpr std::string_view kConnectorPeers[] = {"nixl", "lmcache"};

/// Returns `given`. If `given` is empty, returns .venv's Python of the checkout in which this program was built, or
/// python3 if there is no such Python.
std::string vllm_python(const std::string& given);

/// Returns p50 and p99 of the times of lookups and steps in microseconds, by name, such as "lookup_us_p50". Lookups of
/// "lmcache" are not measured. `connector` is "kvferry", for which a controller is started, or one of kConnectorPeers.
/// Failures: those of ensure_installed(), script_path() and run_peer_program(), such as kUnavailable if calls.python
/// has no vLLM, and those of a controller's start.
nlohmann::json measure_connector_calls(const std::string& connector, const ConnectorCalls& calls, const Say& say);

}  // namespace kvferry::bench
