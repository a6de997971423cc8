// Times the scheduler core's calls, without Python, vLLM and threads.
#pragma once

#include <cstdint>
#include <vector>

namespace kvferry::bench {

/// Returns the microseconds of each repetition, which adds and looks up a request with all of its chunks in the pool:
/// that lookup hashes each of the request's tokens once.
std::vector<double> time_core_lookups(std::uint32_t num_tokens, std::uint64_t repeat);

/// Returns the microseconds of each step in which `running` requests decode a token each; full chunks are saved.
std::vector<double> time_core_steps(std::uint32_t running, std::uint64_t repeat);

}  // namespace kvferry::bench
