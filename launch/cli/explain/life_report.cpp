#include "launch/cli/explain/life_report.h"

#include <algorithm>
#include <cstdlib>
#include <set>

#include "launch/cli/explain/event_text.h"
#include "transport/base/printable.h"

namespace kvferry::cli {
namespace {

constexpr TimeNs kAgeMax = 366 * 24 * 3600 * kSecond;  // limit on ages that nodes send, so that sums do not overflow
constexpr TimeNs kTimesDiffer = 5 * kMillisecond;      // allowed overlap of lives on two nodes: times are inexact
constexpr TimeNs kClocksDiffer = 100 * kMillisecond;   // clocks that differ by less are not reported
constexpr std::string_view kBetween = "on the way to the next node (router, network)";

double ms(TimeNs time) { return static_cast<double>(time) / kMillisecond; }

/// Returns what the request does after the event; an empty text if that is the same as before the event, or if the
/// request has finished.
std::string_view phase_after(const LifeEvent& event, std::string_view phase) {
  constexpr std::string_view kLoading = "loading KV into blocks";
  switch (event.what()) {
    case LifeKind::kArrived:
      return "waiting in the engine's queue";
    case LifeKind::kWaits:
      return "waiting for KV of other nodes";
    case LifeKind::kAnswered:
      return "waiting for free blocks";
    case LifeKind::kAdmitted:
      return event.loaded > 0 ? "loading within a step, and computing" : "computing";
    case LifeKind::kLoadBegan:
      return kLoading;
    case LifeKind::kLoaded:
      return phase == kLoading ? "computing" : "";
    case LifeKind::kComputed:
      return "decoding";
    case LifeKind::kPreempted:
      return "preempted, waiting in the engine's queue";
    default:
      return "";
  }
}

/// Returns the request's life on the node. Its times are on this process's clock, as NodeAnswer::at is.
NodeLife life_of(const NodeAnswer& node, const RequestLife& life, const NodeNames& names) {
  NodeLife made;
  made.node = printable(node.engine_id);
  made.role = printable(node.role);
  made.request = printable(life.request);
  if (is_trace_id(life.trace)) made.trace = life.trace;
  made.is_cut = life.is_cut;
  made.error = node.error;
  made.is_running = !life.events.empty();
  made.began = made.ended = node.at;  // neither is set again if all events of the life were overwritten
  std::string_view phase = "in an unknown state, because earlier events were overwritten";
  for (const LifeEvent& event : life.events) {
    TimeNs at = node.at - std::clamp<TimeNs>(event.at, 0, kAgeMax);
    if (!made.lines.empty()) at = std::max(at, made.ended);
    if (made.lines.empty()) {
      const bool has_waited = event.what() == LifeKind::kArrived && event.duration > 0 && event.duration <= kWaitMax;
      made.began = made.ended = has_waited ? at - event.duration : at;
      if (has_waited) phase = "waiting in the server, until its scheduler's first lookup";
    }
    made.age = node.at - made.began;
    const bool is_end = event.what() == LifeKind::kFinished;
    const std::string_view next = phase_after(event, phase);
    if (made.is_running && (is_end || !next.empty())) {
      if (at > made.ended) made.parts.push_back({made.node, std::string(phase), at - made.ended});
      made.ended = at;
      if (!is_end) phase = next;
      made.is_running = !is_end;
    }
    made.lines.push_back({at, kind_name(event.what()), event_text(event, names), event});
  }
  if (made.is_running && !made.lines.empty()) {
    made.parts.push_back({made.node, std::string(phase) + " (still)", node.at - made.ended});
    made.ended = node.at;
  }
  return made;
}

void add_recomputed(const NodeLife& life, const NodeNames& names, std::vector<Recomputation>& all) {
  for (const LifeLine& line : life.lines)
    if (const std::uint32_t again = recomputed_tokens(line.event); again > 0)
      all.push_back({life.node, again, cause_text(line.event, names)});
}

/// Returns the parts of all lives in order, with a part for the time between two nodes; no parts if the lives overlap.
std::vector<LifePart> joined(const std::vector<NodeLife>& lives) {
  std::vector<LifePart> parts;
  for (std::size_t i = 0; i < lives.size(); ++i) {
    const TimeNs between = i == 0 ? 0 : lives[i].began - lives[i - 1].ended;
    if (i > 0 && between < -kTimesDiffer - lives[i].error - lives[i - 1].error) return {};
    if (i > 0) parts.push_back({"", std::string(kBetween), std::max<TimeNs>(between, 0)});
    parts.insert(parts.end(), lives[i].parts.begin(), lives[i].parts.end());
  }
  return parts;
}

std::vector<std::string> missing_nodes(const std::vector<NodeAnswer>& answers) {
  std::vector<std::string> missing;
  std::set<std::string, std::less<>> endpoints, gone;
  for (const NodeAnswer& node : answers) {
    endpoints.insert(node.endpoint);
    if (!node.has_answered)
      missing.push_back(fmt::format("node {} at {} did not answer, so its events are missing",
                                    printable(node.engine_id), printable(node.endpoint)));
  }
  for (const NodeAnswer& node : answers)
    for (const RequestLife& life : node.lives)
      for (const LifeEvent& event : life.events)
        if (const auto peer = event.peer.view(); !peer.empty() && !endpoints.contains(peer)) gone.emplace(peer);
  for (const std::string& endpoint : gone)
    missing.push_back(
        fmt::format("the node at {} is not registered any more, so its events are missing", printable(endpoint)));
  return missing;
}

/// Returns a sentence for each node that has lives and whose host's clock differs from this host's by at least
/// kClocksDiffer plus NodeAnswer::error. If several nodes have lives, also returns a sentence about the error of times
/// that are compared with those of another node.
std::vector<std::string> clock_sentences(const std::vector<NodeAnswer>& answers) {
  std::vector<std::string> sentences;
  std::set<std::string, std::less<>> nodes;
  TimeNs error = 0;
  for (const NodeAnswer& node : answers) {
    if (node.lives.empty() || !nodes.insert(node.endpoint).second) continue;
    error = std::max(error, node.error);
    const TimeNs ahead = node.clock_ahead.value_or(0);
    if (std::abs(ahead) < kClocksDiffer + node.error) continue;
    sentences.push_back(fmt::format(
        "the clock of {}'s host is {:.1f} s {} this host's, and so are the times in its log; "
        "the times above do not depend on it",
        printable(node.engine_id), static_cast<double>(std::abs(ahead)) / kSecond, ahead > 0 ? "ahead of" : "behind"));
  }
  if (nodes.size() > 1)
    sentences.push_back(
        fmt::format("events are ordered by their age when each node answered; times of different nodes "
                    "are accurate to {:.1f} ms",
                    ms(2 * error)));
  return sentences;
}

}  // namespace

LifeReport make_report(const std::vector<NodeAnswer>& answers) {
  LifeReport report;
  const NodeNames& names = report.names;
  for (const NodeAnswer& node : answers) report.names[node.endpoint] = node.engine_id;
  for (const NodeAnswer& node : answers)
    for (const RequestLife& life : node.lives) report.lives.push_back(life_of(node, life, names));
  std::ranges::stable_sort(report.lives, {}, &NodeLife::began);
  report.parts = joined(report.lives);
  report.missing = missing_nodes(answers);
  report.clocks = clock_sentences(answers);
  if (report.lives.empty()) return report;
  const TimeNs zero = report.lives[0].began;
  for (NodeLife& life : report.lives) {
    life.began -= zero;
    life.ended -= zero;
    for (LifeLine& line : life.lines) line.at -= zero;
    report.duration = std::max(report.duration, life.ended);
    add_recomputed(life, names, report.recomputed);
  }
  return report;
}

std::string report_text(const LifeReport& report, const std::string& request) {
  std::string text = fmt::format("request {}: {:.1f} ms\n", printable(request), ms(report.duration));
  for (const NodeLife& life : report.lives) {
    text += fmt::format("\n{} ({}), request {}{}{}\n", life.node, life.role.empty() ? "no role" : life.role,
                        life.request, life.trace.empty() ? "" : ", trace ", life.trace);
    if (life.is_cut) text += "             earlier events were overwritten by those of other requests\n";
    for (const LifeLine& line : life.lines) text += fmt::format("  {:>10.1f} ms  {}\n", ms(line.at), line.text);
  }
  text += "\nwhere the time went\n";
  const auto add_part = [&](const LifePart& part) {
    text += fmt::format("  {:>10.1f} ms  {}{}{}\n", ms(part.duration), short_name(part.node),
                        part.node.empty() ? "" : ": ", part.what);
  };
  std::ranges::for_each(report.parts, add_part);
  if (report.parts.empty())  // the lives overlap, so the parts of each are listed by themselves
    for (const NodeLife& life : report.lives) std::ranges::for_each(life.parts, add_part);
  text += fmt::format("\n{}\n", report.recomputed.empty() ? "computed again: nothing" : "computed again");
  for (const Recomputation& one : report.recomputed)
    text += fmt::format("  {} tokens on {}: {}\n", one.num_tokens, short_name(one.node), one.cause);
  for (const std::string& sentence : report.missing) text += fmt::format("missing: {}\n", sentence);
  for (const std::string& sentence : report.clocks) text += fmt::format("clocks: {}\n", sentence);
  return text;
}

nlohmann::json report_json(const LifeReport& report, const std::string& request) {
  using Json = nlohmann::json;
  const auto parts_json = [](const std::vector<LifePart>& parts) {
    Json all = Json::array();
    for (const LifePart& part : parts)
      all.push_back({{"node", part.node}, {"what", part.what}, {"ms", ms(part.duration)}});
    return all;
  };
  Json lives = Json::array(), recomputed = Json::array();
  for (const NodeLife& life : report.lives) {
    Json events = Json::array();
    for (const LifeLine& line : life.lines) {
      const LifeEvent& event = line.event;
      events.push_back({{"at_ms", ms(line.at)},
                        {"event", line.kind},
                        {"text", line.text},
                        {"cause", event.why() == Cause::kNone ? "" : text_of(event.why())},
                        {"tokens", event.tokens},
                        {"local", event.local},
                        {"loaded", event.loaded},
                        {"expected", event.expected},
                        {"chunks", event.chunks},
                        {"failed", event.failed},
                        {"bytes", event.bytes},
                        {"duration_ms", ms(event.duration)},
                        {"limit_gb_per_s", event.limit_mb_per_s * 1e-3},
                        {"share_of_limit", share_of_limit(event)},
                        {"peer", printable(event.peer.view())},
                        {"path", printable(event.path.view())}});
    }
    lives.push_back({{"node", life.node},
                     {"role", life.role},
                     {"request", life.request},
                     {"trace", life.trace},
                     {"is_cut", life.is_cut},
                     {"is_running", life.is_running},
                     {"began_ms", ms(life.began)},
                     {"ended_ms", ms(life.ended)},
                     {"events", std::move(events)},
                     {"parts", parts_json(life.parts)}});
  }
  for (const Recomputation& one : report.recomputed)
    recomputed.push_back({{"node", one.node}, {"tokens", one.num_tokens}, {"cause", one.cause}});
  return {{"request", request},        {"duration_ms", ms(report.duration)},  {"parts", parts_json(report.parts)},
          {"lives", std::move(lives)}, {"recomputed", std::move(recomputed)}, {"missing", report.missing},
          {"clocks", report.clocks}};
}

}  // namespace kvferry::cli
