// The figures of `kvferry bench controller`: a table for people, names and numbers for programs.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "launch/bench/harness/median.h"
#include "launch/bench/harness/progress.h"

namespace kvferry::bench {

struct Speed {
  double per_s = 0, us_p50 = 0, us_p99 = 0;
};

/// Sorts them.
inline Speed speed_of(std::vector<double>& times_us) {
  std::sort(times_us.begin(), times_us.end());
  double total_us = 0;
  for (const double time_us : times_us) total_us += time_us;
  return {static_cast<double>(times_us.size()) * 1e6 / total_us, times_us[times_us.size() / 2],
          times_us[times_us.size() * 99 / 100]};
}

inline Speed median_speed(const std::vector<Speed>& speeds) {
  const auto of = [&](double Speed::*field) {
    std::vector<double> values;
    for (const Speed& speed : speeds) values.push_back(speed.*field);
    return median(std::move(values));
  };
  return {of(&Speed::per_s), of(&Speed::us_p50), of(&Speed::us_p99)};
}

/// To add a figure: begin() what takes a while, row() what people read, figures() what programs read.
class ControllerReport {
 public:
  explicit ControllerReport(std::size_t num_steps) : progress_(num_steps) {}

  void group(std::string name) { group_ = std::move(name); }
  void begin(const std::string& what) { progress_.begin_step(fmt::format("{}: {}", group_, what)); }
  void row(const std::string& what, const std::string& text) {
    rows_.emplace_back(fmt::format("{}: {}", group_, what), text);
    progress_.end_step();
  }
  /// One more line of the step that ended last.
  void note(const std::string& what, const std::string& text) {
    rows_.emplace_back(fmt::format("{}: {}", group_, what), text);
  }
  void speed_row(const std::string& what, const Speed& speed, const std::string& name) {
    row(what, fmt::format("{:>9.0f} /s   p50 {:>6.2f} us   p99 {:>6.2f} us", speed.per_s, speed.us_p50, speed.us_p99));
    figures_[name + "_per_s"] = speed.per_s;
    figures_[name + "_us_p50"] = speed.us_p50;
    figures_[name + "_us_p99"] = speed.us_p99;
  }
  void say(const std::string& line) { progress_.say(line); }

  nlohmann::json& figures() { return figures_; }
  const nlohmann::json& figures() const { return figures_; }
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
