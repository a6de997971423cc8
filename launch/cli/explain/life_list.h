// A table of requests, as `kvferry explain --last` and `--slowest` show it.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "launch/cli/explain/life_report.h"

namespace kvferry::cli {

/// A request on one node, which may still run there.
struct ListedLife {
  std::string node, role, request;
  TimeNs age = 0, duration = 0;  // time since the request came to the node; time that it spent there
  bool is_running = false;
  std::uint32_t preemptions = 0, recomputed = 0;  // number of preemptions; number of tokens computed again
  std::string cause{};                            // why the first of these tokens were computed again
};

/// Returns up to `num` requests of all nodes: those that took longest if `slowest` is true, otherwise the newest ones.
std::vector<ListedLife> list_lives(const LifeReport& report, std::size_t num, bool slowest);
std::string list_text(const std::vector<ListedLife>& lives);
nlohmann::json list_json(const std::vector<ListedLife>& lives);

}  // namespace kvferry::cli
