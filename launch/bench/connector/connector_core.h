// Times the calls of the scheduler core, without Python, vLLM or threads.
#pragma once

#include <cstdint>
#include <vector>

namespace kvferry::bench {

/// Returns the time of each repetition in microseconds. A repetition adds a request whose chunks are all in the pool,
/// and looks up the request. The time includes hashing the request's tokens.
std::vector<double> time_core_lookups(std::uint32_t num_tokens, std::uint64_t repeat);

/// Returns the time of each step in microseconds. In each step `running` requests decode one token each, and chunks
/// that become full are saved.
std::vector<double> time_core_steps(std::uint32_t running, std::uint64_t repeat);

}  // namespace kvferry::bench
