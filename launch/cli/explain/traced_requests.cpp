#include "launch/cli/explain/traced_requests.h"

#include <algorithm>
#include <limits>
#include <map>
#include <utility>

namespace kvferry::cli {
namespace {

constexpr std::string_view kHexDigits = "0123456789abcdef";

/// Returns a name that the lives of one request have in common on all nodes: the request's id on the node that got the
/// prompt first, without the hyphen and the eight hexadecimal digits that vLLM appends.
std::string name_of(const RequestLife& life) {
  std::string_view name = life.request;
  for (const LifeEvent& event : life.events)
    if (event.what() == LifeKind::kArrived && !event.note.view().empty()) name = event.note.view();
  const std::size_t hyphen = name.rfind('-');
  if (hyphen != name.npos && name.size() - hyphen == 9 && name.find_first_not_of(kHexDigits, hyphen + 1) == name.npos)
    name = name.substr(0, hyphen);
  return std::string(name);
}

/// Returns the time of the earliest event of all lives, on this process's clock, as NodeAnswer::at is.
TimeNs begin_of(const std::vector<NodeAnswer>& answers) {
  TimeNs begin = std::numeric_limits<TimeNs>::max();
  for (const NodeAnswer& node : answers)
    for (const RequestLife& life : node.lives)
      if (!life.events.empty()) begin = std::min(begin, node.at - std::max<TimeNs>(life.events[0].at, 0));
  return begin;
}

}  // namespace

std::string trace_id_in(std::string_view text) {
  const bool is_parent = text.size() == 55 && text.starts_with("00-") && text[35] == '-' && text[52] == '-';
  const std::string_view id = is_parent ? text.substr(3, 32) : text;
  return is_trace_id(id) ? std::string(id) : "";
}

std::vector<std::vector<NodeAnswer>> split_by_request(const std::vector<NodeAnswer>& answers) {
  std::vector<NodeAnswer> without_lives = answers;
  for (NodeAnswer& node : without_lives) node.lives.clear();
  std::map<std::string, std::vector<NodeAnswer>> by_name;
  for (std::size_t i = 0; i < answers.size(); ++i)
    for (const RequestLife& life : answers[i].lives)
      by_name.try_emplace(name_of(life), without_lives).first->second[i].lives.push_back(life);
  std::vector<std::vector<NodeAnswer>> requests;
  for (auto& [name, lives] : by_name) requests.push_back(std::move(lives));
  std::ranges::stable_sort(requests, {}, begin_of);
  return requests;
}

}  // namespace kvferry::cli
