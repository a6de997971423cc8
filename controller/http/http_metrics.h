// The controller's metrics in Prometheus' text format. prometheus-cpp would save about twenty lines here, but would add
// a shared library to the controller and the wheel.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace kvferry::controller {

/// Collects samples and writes them grouped by metric, as the format requires.
class Metrics {
 public:
  using Labels = std::vector<std::pair<std::string_view, std::string>>;
  /// Adds a sample. The metric must be in the table of http_metrics.cpp, which has its type and help text; `name` is
  /// its name without "kvferry_controller_".
  void add(const std::string& name, double value, const Labels& labels = {});
  /// Returns all metrics of the table. A metric without samples has only its help text and type.
  std::string text() const;

 private:
  std::map<std::string, std::string, std::less<>> samples_;  // [name] the metric's samples, as lines of text
};

}  // namespace kvferry::controller
