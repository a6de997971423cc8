// The figures of `kvferry bench controller`: a table for readers, names and numbers for programs.
#pragma once

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "launch/bench/harness/progress.h"
#include "launch/bench/harness/statistics.h"

namespace kvferry::bench {

/// To add a figure: begin() a step, then row() for the table and figure() for the JSON.
class ControllerReport {
 public:
  explicit ControllerReport(std::size_t num_steps) : progress_(num_steps) {}

  void group(std::string name) { group_ = std::move(name); }
  void begin(const std::string& what) { progress_.begin_step(fmt::format("{}: {}", group_, what)); }
  /// Adds a row to the table and ends the step.
  void row(const std::string& what, const std::string& text) {
    note(what, text);
    progress_.end_step();
  }
  /// Adds a row without a step of its own.
  void note(const std::string& what, const std::string& text) {
    rows_.emplace_back(fmt::format("{}: {}", group_, what), text);
  }
  void figure(const std::string& name, double value) { figures_[name] = value; }
  void speed_row(const std::string& what, const Speed& speed, const std::string& name) {
    row(what, fmt::format("{:>9.0f} /s   p50 {:>6.2f} us   p99 {:>6.2f} us", speed.per_s, speed.us_p50, speed.us_p99));
    figure(name + "_per_s", speed.per_s);
    figure(name + "_us_p50", speed.us_p50);
    figure(name + "_us_p99", speed.us_p99);
  }
  void say(const std::string& line) { progress_.say(line); }

  nlohmann::json& figures() { return figures_; }
  std::string table() const {
    std::string text;
    for (const auto& [what, figures] : rows_) text += fmt::format("{:<56} {}\n", what, figures);
    return text;
  }

 private:
  Progress progress_;
  std::string group_;
  std::vector<std::pair<std::string, std::string>> rows_;
  nlohmann::json figures_;
};

}  // namespace kvferry::bench
