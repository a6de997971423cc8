// The scheduler core's calls, without Python, vLLM and threads around them.
#pragma once

#include <cstdint>
#include <vector>

namespace kvferry::bench {

/// Microseconds of each repetition. A request comes and is looked up, all of its chunks lie in the pool: each of its
/// tokens is hashed once.
std::vector<double> time_core_lookups(std::uint32_t num_tokens, std::uint64_t repeat);

/// The same of a step in which `running` requests decode a token each; chunks fill and are saved as they do.
std::vector<double> time_core_steps(std::uint32_t running, std::uint64_t repeat);

}  // namespace kvferry::bench
