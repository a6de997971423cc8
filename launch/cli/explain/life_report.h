// Combines the nodes' answers about a request into a report: its events in order, where its time went, and what was
// computed again.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "launch/cli/explain/ask_nodes.h"
#include "launch/cli/explain/event_text.h"

namespace kvferry::cli {

/// A part of the time of a request, and what the request did in it.
struct LifePart {
  std::string node;  // engine id; empty: the request was between two nodes
  std::string what;
  TimeNs duration = 0;
};

struct LifeLine {
  TimeNs at = 0;  // time since the first life on any node began
  std::string kind, text;
  LifeEvent event;
};

/// A request's life on one node. `trace`: its W3C trace id; empty: none is known.
struct NodeLife {
  std::string node, role, request, trace;
  bool is_cut = false, is_running = false;
  TimeNs began = 0, ended = 0;  // times since the first life on any node began
  TimeNs age = 0;               // time from `began` until the node answered
  TimeNs error = 0;             // limit on the error of the times, as in NodeAnswer
  std::vector<LifeLine> lines;
  std::vector<LifePart> parts;  // their durations add up to ended - began
};

struct Recomputation {
  std::string node;
  std::uint32_t num_tokens = 0;
  std::string cause;
};

struct LifeReport {
  NodeNames names;
  std::vector<NodeLife> lives;  // the lives on all nodes, in the order in which they began
  /// What the time from the beginning of the first life to the end of the last one was spent on, in order; empty if
  /// lives overlap, for example those of a request with several answers (n > 1).
  std::vector<LifePart> parts;
  TimeNs duration = 0;
  std::vector<Recomputation> recomputed;
  std::vector<std::string> missing;  // sentences that say whose events are missing
  std::vector<std::string> clocks;   // sentences about the times of different nodes
};

LifeReport make_report(const std::vector<NodeAnswer>& answers);
std::string report_text(const LifeReport& report, const std::string& request);
nlohmann::json report_json(const LifeReport& report, const std::string& request);

}  // namespace kvferry::cli
