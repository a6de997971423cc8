// The result of a run: one row for each engine, setting, path, kind of memory, direction and block size.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

namespace kvferry::bench {

struct Row {
  std::string engine;
  std::string setting;
  std::string path;
  std::string memory;
  std::string op;
  std::uint64_t block_bytes = 0;
  std::uint64_t num_blocks = 0;
  double gb_per_s = 0;  // rate in units of 10^9 bytes per second
  double of_first = 0;  // rate divided by that of kvferry's first setting, where both took turns; otherwise 0
  double latency_us_p50 = 0;
  double latency_us_p99 = 0;
  double cpu_s_per_gib = 0;  // user and system time of both processes per GiB moved
  bool verified = false;
};

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Row, engine, setting, path, memory, op, block_bytes, num_blocks, gb_per_s, of_first,
                                   latency_us_p50, latency_us_p99, cpu_s_per_gib, verified)

/// Returns a table per path, memory and direction, with a row per block size, engine and setting. The column
/// "kvferry/" is the rate of kvferry's first setting divided by the rate of the row: where both took turns, the median
/// of what it was in each round.
std::string table_of(const std::vector<Row>& rows);

}  // namespace kvferry::bench
