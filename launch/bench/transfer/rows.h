// The result: one row for each engine, setting, path, kind of memory, direction and block size.
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
  double gb_per_s = 0;  // 10^9 bytes
  double latency_us_p50 = 0;
  double latency_us_p99 = 0;
  double cpu_s_per_gib = 0;  // user + system, both sides together
  bool verified = false;
};

nlohmann::json to_json(const Row& row);

/// A table for each path, memory and direction: block sizes downwards, with how many times as fast kvferry is.
std::string table_of(const std::vector<Row>& rows);

}  // namespace kvferry::bench
