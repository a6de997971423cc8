// The parts of `kvferry bench controller`, and the report to which each adds rows and figures.
#pragma once

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "launch/bench/controller/controller_far_side.h"
#include "launch/bench/harness/controller_load.h"
#include "launch/bench/harness/progress.h"
#include "launch/bench/harness/statistics.h"

namespace kvferry::bench {

/// Collects the figures: in a table for readers, and by name in JSON for programs. To add a figure, call begin(), then
/// row() for the table and figure() for the JSON object.
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
  /// Adds a row to the table and does not end the step.
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

constexpr std::size_t kNumSteps = 24;  // steps of the progress bar in all parts together

// If a part finds a wrong answer of the controller, it fails with kCorrupt, since a wrong answer makes all figures of a
// run invalid.

/// Measures lookups over the controller's sockets and, to compare, short messages that an echo server returns over the
/// same kinds of sockets; then calls measure_visible(). Forks a process for the server (ControllerFarSide), so no other
/// thread may be running. Failures: those of ControllerFarSide and registered(); kUnavailable if a server does not
/// answer.
void measure_remote(const ControllerLoad& load, ControllerReport& report);

/// Measures the time until another node finds the chunks that a busy node has published. Failures: those of
/// registered(); kUnavailable if the controller does not answer.
void measure_visible(const ControllerFarSide& far, ControllerReport& report);

/// Measures the index and the directory in the calling thread, without a server.
void measure_local(const ControllerLoad& load, ControllerReport& report);

/// Measures the rate at which the controller decodes and indexes cache events, encoded as vLLM encodes them.
void measure_events(const ControllerLoad& load, ControllerReport& report);

/// Measures the time from the start of a controller, with a state folder like that of a killed controller, until it
/// answers a lookup, and the time until a controller without state has the snapshots of all workers.
void measure_recovery(const ControllerLoad& load, ControllerReport& report);

}  // namespace kvferry::bench
