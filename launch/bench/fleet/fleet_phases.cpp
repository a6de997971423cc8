#include "launch/bench/fleet/fleet_phases.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <future>

#include "controller/api/status.h"
#include "launch/bench/harness/failure.h"
#include "launch/bench/harness/interrupt.h"
#include "launch/bench/harness/pinned.h"
#include "launch/bench/harness/programs.h"
#include "launch/bench/harness/statistics.h"

namespace kvferry::bench {
namespace {

using controller::Status;

constexpr TimeNs kPhasePatience = 60 * kSecond;
constexpr TimeNs kRestartsTime = 180 * kSecond;  // limit on the time in which a phase restarts its nodes
constexpr TimeNs kLeaseTime = 10 * kSecond;      // longest wait until dead nodes expire: four times the lease
constexpr TimeNs kWarmUp = kSecond;
constexpr int kStatusMs = 10'000;
constexpr double kBusyCore = 0.95;
constexpr double kLateShare = 0.05;
constexpr std::size_t kAtOnce = 8;  // number of nodes that restart at the same time
constexpr TimeNs kBetweenProbes = 20 * kMillisecond;

double in_seconds(TimeNs time) { return static_cast<double>(time) * 1e-9; }

class Phases {
 public:
  Phases(const FleetStep& step, FleetControllers& controllers, Fleet& fleet, nlohmann::json& row)
      : step_(step), controllers_(controllers), fleet_(fleet), row_(row), num_nodes_(step.load.num_nodes) {}

  /// Waits until all nodes are registered and the controller has all their chunks.
  void cold_start(TimeNs begun) {
    turn_until([&] { return fleet_.num_registered() == num_nodes_; }, kPhasePatience, "not all nodes registered");
    row_["register_s"] = in_seconds(fleet_.now() - begun);
    turn_until([&] { return fleet_.num_up() == num_nodes_; }, kPhasePatience, "not all nodes published their chunks");
    row_["told_s"] = in_seconds(fleet_.now() - begun);
  }

  void steady() {
    fleet_.set_traffic(true);
    turn_for(kWarmUp);
    const Totals before = totals_amid_traffic();
    fleet_.take_lookups();
    fleet_.take_lateness();
    const double own_cpu = cpu_seconds(::getpid());
    const TimeNs begun = fleet_.now();
    turn_for(step_.duration);
    const double took = in_seconds(fleet_.now() - begun);
    row_["bench_cores"] = (cpu_seconds(::getpid()) - own_cpu) / took;
    row_["bench_late_share"] = in_seconds(fleet_.take_lateness()) / took;
    LookupTimes lookups = fleet_.take_lookups();
    const Totals after = totals_amid_traffic();
    const double counted = in_seconds(after.at - before.at);
    row_["messages_in_per_s"] = (after.messages_in - before.messages_in) / counted;
    row_["messages_out_per_s"] = (after.messages_out - before.messages_out) / counted;
    row_["replies_dropped"] = after.dropped - before.dropped;
    row_["nodes_expired"] = after.expired;
    row_["lookups_per_s"] = static_cast<double>(lookups.us.size()) / took;
    row_["lookup_us_p50"] = percentile(lookups.us, 50);
    row_["lookup_us_p99"] = percentile(lookups.us, 99);
    row_["wrong_answers"] = lookups.num_wrong;
    row_["failed_lookups"] = lookups.num_failed;
    double rss_mib = 0;
    for (std::size_t i = 0; i < step_.controllers.num_replicas; ++i)
      rss_mib = std::max(rss_mib, controllers_.rss_mib(i));
    row_["controller_cores"] = (after.cpu_s - before.cpu_s) / counted;
    row_["busiest_controller_cores"] = after.busiest_since(before) / counted;
    row_["controller_rss_mib"] = rss_mib;
    row_["controller_files"] = controllers_.num_files(0);
    row_["chunks"] = after.chunks;
  }

  /// Lets one node in a hundred behave as if it had lost power. Measures for how long lookups of the chunks of these
  /// nodes still name them.
  void dead_nodes() {
    const std::uint32_t num_dead = std::max<std::uint32_t>(1, num_nodes_ / 100);
    const TimeNs killed_at = fleet_.now();
    for (std::uint32_t i = 0; i < num_dead; ++i) fleet_.fall_silent(dead(i, num_dead));
    TimeNs probed_at = 0;
    const auto all_gone = [&] {
      bool all = true;
      const bool is_due = fleet_.now() - probed_at >= kBetweenProbes;
      if (is_due) probed_at = fleet_.now();
      for (std::uint32_t i = 0; i < num_dead; ++i) {
        if (fleet_.seen_gone(dead(i, num_dead))) continue;
        all = false;
        if (is_due) fleet_.probe(dead(i, num_dead));
      }
      return all;
    };
    turn_until(all_gone, kLeaseTime, "lookups still name nodes that have died");
    std::vector<double> times;
    for (std::uint32_t i = 0; i < num_dead; ++i)
      times.push_back(in_seconds(*fleet_.seen_gone(dead(i, num_dead)) - killed_at));
    row_["dead_noticed_s_p50"] = percentile(times, 50);
    row_["dead_noticed_s_max"] = times.back();
    std::vector<std::uint32_t> nodes;
    for (std::uint32_t i = 0; i < num_dead; ++i) nodes.push_back(dead(i, num_dead));
    restart(nodes, false, "nodes that had died did not all register again");
  }

  /// Lets one node in ten leave and join again, eight nodes at a time, while the other nodes send traffic.
  void rolling_restart() {
    std::vector<std::uint32_t> nodes;
    for (std::uint32_t node = 5; node < num_nodes_; node += 10) nodes.push_back(node);
    fleet_.take_lookups();
    const TimeNs begun = fleet_.now();
    restart(nodes, true, "restarted nodes did not all register");
    row_["rolling_s"] = in_seconds(fleet_.now() - begun);
    LookupTimes lookups = fleet_.take_lookups();
    row_["rolling_lookup_us_p99"] = percentile(lookups.us, 99);
    row_["rolling_failed_lookups"] = lookups.num_failed;
  }

  /// Kills a controller, and starts it again with its state. If there are other replicas, the nodes use those, and the
  /// time from the kill to the last slow answer to a lookup is measured before the controller starts again. Otherwise
  /// the time from the new start until all nodes are registered is measured.
  void killed_controller() {
    const bool is_alone = step_.controllers.num_replicas == 1;
    fleet_.take_lookups();
    const TimeNs killed_at = fleet_.now();
    controllers_.kill(0);
    if (!is_alone) {
      turn_for(5 * kSecond);
      turn_until([&] { return fleet_.num_waiting() < num_nodes_ / 10 + 5; }, kPhasePatience,
                 "many lookups had no answer after a replica was killed");
      const std::optional<TimeNs> last = fleet_.last_slow(100 * kMillisecond);
      row_["failover_s"] = last ? in_seconds(*last - killed_at) : 0.0;
      row_["failover_failed_lookups"] = fleet_.take_lookups().num_failed;
    }
    fleet_.expect_all_again();
    const TimeNs begun = fleet_.now();
    controllers_.start_again(0);
    if (!is_alone) return turn_for(kWarmUp);
    turn_until([&] { return fleet_.num_registered() == num_nodes_; }, kPhasePatience,
               "not all nodes registered after the controller's restart");
    row_["restart_register_s"] = in_seconds(fleet_.now() - begun);
  }

  void judge() {
    const double p99 = row_.value("lookup_us_p99", 0.0);
    if (!row_["broke"].get<std::string>().empty()) return;
    if (row_["busiest_controller_cores"] > kBusyCore)
      row_["broke"] = fmt::format("a controller uses {:.2f} of a processor core; more than {} counts as overloaded",
                                  row_["busiest_controller_cores"].get<double>(), kBusyCore);
    else if (row_["wrong_answers"] > 0 || row_["failed_lookups"] > 0)
      row_["broke"] =
          fmt::format("{} lookups failed, and {} did not name the holder", row_["failed_lookups"].get<std::uint64_t>(),
                      row_["wrong_answers"].get<std::uint64_t>());
    else if (row_["bench_late_share"] > kLateShare)
      row_["broke"] = fmt::format(
          "the benchmark's own process could not keep up for {:.0f} % of the time, so the figures do not show the "
          "controller's limit",
          row_["bench_late_share"].get<double>() * 100);
    else if (p99 > in_seconds(kSlowLookup) * 1e6)
      row_["broke"] = fmt::format("one lookup in a hundred takes {:.0f} ms or more; allowed: up to {} ms", p99 * 1e-3,
                                  kSlowLookup / kMillisecond);
  }

 private:
  struct Totals {
    TimeNs at = 0;  // time at which the last of the controllers' answers arrived
    double messages_in = 0, messages_out = 0, cpu_s = 0;
    std::uint64_t dropped = 0, expired = 0, chunks = 0;
    std::vector<double> each_cpu_s;

    double busiest_since(const Totals& before) const {
      double busiest = 0;
      for (std::size_t i = 0; i < each_cpu_s.size(); ++i)
        busiest = std::max(busiest, each_cpu_s[i] - before.each_cpu_s[i]);
      return busiest;
    }
  };

  /// Returns the sums over all controllers, except for chunks, which are those of the first controller.
  Totals totals() const {
    Totals totals;
    for (std::size_t i = 0; i < step_.controllers.num_replicas; ++i) {
      const Status status = need(controller::fetch_status(controllers_.address(i), kStatusMs));
      totals.each_cpu_s.push_back(controllers_.cpu_s(i));
      totals.cpu_s += totals.each_cpu_s.back();
      totals.messages_in += static_cast<double>(status.counters.messages_taken);
      totals.messages_out += static_cast<double>(status.counters.messages_sent);
      totals.dropped += status.counters.replies_dropped;
      totals.expired += status.counters.nodes_expired;
      for (const controller::NodeStatus& node : status.nodes) totals.chunks += i == 0 ? node.num_chunks : 0;
    }
    totals.at = fleet_.now();
    return totals;
  }

  /// Asks for the totals on another thread, so that the nodes continue meanwhile. Otherwise the figures would include a
  /// pause and then a burst of overdue messages, which nodes on machines of their own would not send.
  Totals totals_amid_traffic() {
    std::future<Totals> asked = std::async(std::launch::async, [this] { return totals(); });
    while (asked.wait_for(std::chrono::seconds(0)) != std::future_status::ready) turn_for(kMillisecond);
    return asked.get();
  }

  std::uint32_t dead(std::uint32_t i, std::uint32_t num_dead) const { return i * (num_nodes_ / num_dead); }

  void restart(const std::vector<std::uint32_t>& nodes, bool leaves_first, const char* what) {
    const TimeNs end = fleet_.now() + kRestartsTime;
    for (std::size_t next = 0; next < nodes.size();) {
      std::vector<std::uint32_t> some;
      for (; next < nodes.size() && some.size() < kAtOnce; ++next) {
        if (leaves_first) fleet_.leave(nodes[next]);
        fleet_.join(nodes[next]);
        some.push_back(nodes[next]);
      }
      const auto are_up = [&] {
        return std::all_of(some.begin(), some.end(), [&](std::uint32_t node) { return fleet_.is_up(node); });
      };
      turn_until(are_up, std::min(kPhasePatience, end - fleet_.now()), what);
    }
  }

  void turn_for(TimeNs time) {
    turn_within(time, [] { return false; });
  }
  /// Throws a Failure kTimeout if reached() did not return true within `patience`; row_["broke"] then begins with
  /// `what`.
  template <class Reached>
  void turn_until(const Reached& reached, TimeNs patience, const char* what) {
    if (turn_within(patience, reached)) return;
    std::string broke =
        fmt::format("{} (waited {:.0f} s; {} of {} nodes are registered and have published their chunks)", what,
                    in_seconds(patience), fleet_.num_up(), num_nodes_);
    if (!fleet_.refusal().empty()) broke += "; the controller's last refusal: " + fleet_.refusal();
    row_["broke"] = broke;
    throw Failure({ErrorCode::kTimeout, broke});
  }
  template <class Reached>
  bool turn_within(TimeNs time, const Reached& reached) {
    for (const TimeNs end = fleet_.now() + time; fleet_.now() < end;) {
      if (reached()) return true;
      if (is_interrupted()) throw Failure(interrupted());
      fleet_.turn();
    }
    return false;
  }

  const FleetStep& step_;
  FleetControllers& controllers_;
  Fleet& fleet_;
  nlohmann::json& row_;
  std::uint32_t num_nodes_;
};

}  // namespace

nlohmann::json run_fleet_step(const FleetStep& step, const Say& begin) {
  nlohmann::json row = {{"nodes", step.load.num_nodes},
                        {"replicas", step.controllers.num_replicas},
                        {"over", step.controllers.over_streams ? "stream" : "zmq"},
                        {"stores_per_s_and_node", step.load.stores_per_s},
                        {"lookups_per_s_and_node", step.load.lookups_per_s},
                        {"broke", ""}};
  begin("controllers start");
  FleetControllers controllers(step.controllers);
  controllers.start();
  const PinnedHere pinned(0);
  const SteadyClock clock;
  const TimeNs begun = clock.now();
  Fleet fleet(controllers.endpoints(), step.load);
  Phases phases(step, controllers, fleet, row);
  const std::pair<const char*, std::function<void()>> all[] = {
      {"all nodes join", [&] { phases.cold_start(begun); }},
      {"traffic", [&] { phases.steady(); }},
      {"one node in a hundred dies", [&] { phases.dead_nodes(); }},
      {"one node in ten restarts", [&] { phases.rolling_restart(); }},
      {"a controller is killed", [&] { phases.killed_controller(); }}};
  for (const auto& [what, phase] : all) {
    begin(what);
    const Result<void> done = attempt(phase);
    if (!done && done.error().code == ErrorCode::kTimeout) return row;  // row["broke"] says what failed
    need(done);
  }
  phases.judge();
  return row;
}

}  // namespace kvferry::bench
