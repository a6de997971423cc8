#include "connector/runtime/links/node_activity.h"

#include <algorithm>
#include <functional>

namespace kvferry {
namespace {

/// Returns true if the event says that something went wrong. kNoHolder is no failure: no node has a new prompt's KV.
bool is_failure(const LifeEvent& event) {
  switch (event.what()) {
    case LifeKind::kPulled:
    case LifeKind::kPushed:
      return event.failed > 0;
    case LifeKind::kLoaded:
      return event.why() != Cause::kNone;
    case LifeKind::kFetchFailed:
      return event.why() != Cause::kNoHolder;
    default:
      return false;
  }
}

/// Returns the kinds of memory that a transfer went between, such as "GPU to GPU". For a pull without failures, the
/// text also says why chunks went through host slots, if the event's note does.
std::string memory_of(const LifeEvent& event) {
  const bool has_why = event.what() == LifeKind::kPulled && event.failed == 0 && !event.note.view().empty();
  const std::string why = has_why ? ": " + std::string(event.note.view()) : "";
  if (event.in_frames == 0) return controller::report_text("host slots" + why);
  return controller::report_text("GPU to GPU" + (has_why ? ", and host slots" + why : ""));
}

template <class Map, class Order>
void erase_least(Map& map, std::size_t size_max, Order order) {
  if (map.size() > size_max) map.erase(std::min_element(map.begin(), map.end(), order));
}

}  // namespace

void NodeActivity::read(const FlightRecorder& recorder) {
  for (std::uint64_t number = std::max(read_until_ + 1, recorder.oldest()); number <= recorder.last(); ++number)
    take(*recorder.event(number));
  read_until_ = recorder.last();
}

void NodeActivity::add_to(controller::NodeReport& report, TimeNs now) const {
  report.tokens = tokens_.at(now);
  report.local_tokens = local_tokens_.at(now);
  report.loaded_tokens = loaded_tokens_.at(now);
  report.num_failures = num_failures_;

  std::vector<const Path*> paths;
  for (const auto& [key, path] : paths_) paths.push_back(&path);
  std::ranges::sort(paths, std::greater<>(), [](const Path* path) { return path->last_at; });
  for (const Path* path : paths) {
    if (report.paths.size() == controller::kReportPathsMax) break;
    report.paths.push_back(path->sum);
    report.paths.back().gb_per_s = path->bytes.at(now) / static_cast<double>(kRateSpan);  // bytes/ns are GB/s
  }
  for (const Failure& failure : failures_) {
    report.failures.push_back(failure.report);
    report.failures.back().ago_ms = static_cast<std::uint64_t>((now - failure.at) / kMillisecond);
  }
  for (const auto& [chunk, count] : prefixes_) {
    const double per_minute = count.at(now) * static_cast<double>(60 * kSecond) / static_cast<double>(kHitSpan);
    if (per_minute >= 0.1) report.prefixes.push_back({chunk, per_minute});
  }
  std::ranges::sort(report.prefixes, std::greater<>(), &controller::PrefixReport::per_minute);
  report.prefixes.resize(std::min(report.prefixes.size(), controller::kReportPrefixesMax));
}

void NodeActivity::take(const LifeEvent& event) {
  if (is_failure(event)) take_failure(event);
  switch (event.what()) {
    case LifeKind::kArrived:
      return take_prefix(event);
    case LifeKind::kAdmitted:
      tokens_.add(event.tokens, event.at);
      local_tokens_.add(event.local, event.at);
      return loaded_tokens_.add(event.loaded, event.at);
    case LifeKind::kPulled:
      return take_transfer(event, /*is_push=*/false);
    case LifeKind::kPushed:
      // A push without bytes has announced its chunks, and the peer reports their pulls; or the peer had them all.
      if (event.bytes > 0 || event.failed > 0) take_transfer(event, /*is_push=*/true);
      return;
    default:
      return;
  }
}

void NodeActivity::take_transfer(const LifeEvent& event, bool is_push) {
  const std::string peer = controller::report_text(event.peer.view());
  Path& path = paths_[{peer, is_push}];
  path.sum.peer = peer;
  path.sum.is_push = is_push;
  path.sum.memory = memory_of(event);
  path.sum.bytes += event.bytes;
  path.sum.num_failed += event.failed;
  path.bytes.add(static_cast<double>(event.bytes), event.at);
  path.last_at = event.at;
  take_speed(event, path);
  erase_least(paths_, kPathsMax, [](const auto& a, const auto& b) { return a.second.last_at < b.second.last_at; });
}

void NodeActivity::take_speed(const LifeEvent& event, Path& path) {
  controller::PathReport& sum = path.sum;
  if (const std::string name = controller::report_text(event.path.view()); !name.empty() && name != sum.path) {
    sum.path = name;
    sum.limit_gb_per_s = sum.best_gb_per_s = 0;
    path.large_pulls.clear();
  }
  if (event.limit_mb_per_s > 0) sum.limit_gb_per_s = event.limit_mb_per_s * 1e-3;
  if (event.bytes == 0 || event.duration <= 0) return;
  const auto bytes = static_cast<double>(event.bytes);
  sum.last_gb_per_s = bytes / static_cast<double>(event.duration);
  const bool is_large = sum.limit_gb_per_s > 0 && bytes >= sum.limit_gb_per_s * static_cast<double>(kLargePull);
  if (sum.is_push || !is_large) return;
  path.large_pulls.push_back(sum.last_gb_per_s);
  if (path.large_pulls.size() > kLargePullsMax) path.large_pulls.pop_front();
  if (path.large_pulls.size() >= kLargePullsMin) sum.best_gb_per_s = *std::ranges::max_element(path.large_pulls);
}

void NodeActivity::take_failure(const LifeEvent& event) {
  ++num_failures_;
  std::string what = text_of(event.why());
  if (!event.note.view().empty()) what += fmt::format(": {}", event.note.view());
  failures_.push_front({{.what = controller::report_text(what),
                         .peer = controller::report_text(event.peer.view()),
                         .cause = std::string(kCauseNames[event.cause])},
                        event.at});
  if (failures_.size() > controller::kReportFailuresMax) failures_.pop_back();
}

void NodeActivity::take_prefix(const LifeEvent& event) {
  // A prompt that was handed over is counted by the node that handed it over.
  if (event.prefix.view().empty() || event.expected > 0) return;
  prefixes_[std::string(event.prefix.view())].add(1, event.at);
  // Counts decay with time. If there are too many prefixes, the one with the lowest count now is erased, which may be
  // the new one.
  erase_least(prefixes_, kPrefixesMax,
              [&](const auto& a, const auto& b) { return a.second.at(event.at) < b.second.at(event.at); });
}

}  // namespace kvferry
