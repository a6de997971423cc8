#include "launch/cli/explain/life_list.h"

#include <algorithm>
#include <functional>

#include "launch/cli/explain/event_text.h"

namespace kvferry::cli {
namespace {

double seconds(TimeNs time) { return static_cast<double>(time) / kSecond; }

ListedLife listed(const NodeLife& life, const LifeReport& report) {
  ListedLife made{life.node, life.role, life.request, life.age, life.ended - life.began, life.is_running};
  for (const LifeLine& line : life.lines) {
    made.preemptions += line.event.what() == LifeKind::kPreempted;
    const std::uint32_t again = recomputed_tokens(line.event);
    if (again > 0 && made.recomputed == 0) made.cause = cause_text(line.event, report.names);
    made.recomputed += again;
  }
  return made;
}

}  // namespace

std::vector<ListedLife> list_lives(const LifeReport& report, std::size_t num, bool slowest) {
  std::vector<ListedLife> lives;
  for (const NodeLife& life : report.lives) lives.push_back(listed(life, report));
  if (slowest)
    std::ranges::stable_sort(lives, std::ranges::greater(), &ListedLife::duration);
  else
    std::ranges::stable_sort(lives, std::ranges::less(), &ListedLife::age);
  if (lives.size() > num) lives.resize(num);
  return lives;
}

std::string list_text(const std::vector<ListedLife>& lives) {
  std::string text = fmt::format("{:>12} {:>12}  {:<20} {:>9} {:>11}  {}\n", "ARRIVED", "DURATION", "NODE", "PREEMPTED",
                                 "RECOMPUTED", "REQUEST");
  for (const ListedLife& life : lives) {
    text += fmt::format("{:>6.1f} s ago {:>9.1f} ms{} {:<20} {:>9} {:>11}  {}{}\n", seconds(life.age),
                        seconds(life.duration) * 1e3, life.is_running ? '+' : ' ', short_name(life.node),
                        life.preemptions, life.recomputed, life.request, life.cause.empty() ? "" : ": " + life.cause);
  }
  return text + "+: the request still runs. RECOMPUTED: tokens computed again; the end of the line says why\n";
}

nlohmann::json list_json(const std::vector<ListedLife>& lives) {
  nlohmann::json all = nlohmann::json::array();
  for (const ListedLife& life : lives)
    all.push_back({{"node", life.node},
                   {"role", life.role},
                   {"request", life.request},
                   {"arrived_s_ago", seconds(life.age)},
                   {"duration_ms", seconds(life.duration) * 1e3},
                   {"is_running", life.is_running},
                   {"preemptions", life.preemptions},
                   {"recomputed_tokens", life.recomputed},
                   {"cause", life.cause}});
  return {{"requests", std::move(all)}};
}

}  // namespace kvferry::cli
