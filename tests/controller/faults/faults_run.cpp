// controller_faults: breaks a fleet of controllers in random ways for a given time. A checker knows what every worker
// holds. Prints a last line with the result; the exit status is 1 if anything was wrong.
#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <csignal>
#include <cstdio>
#include <filesystem>

#include "fleet.h"

namespace kvferry::faults {
namespace {

// How long a holder that has died may still be found: its lease, one second that all leases get if a controller was
// late itself, and half a second for messages.
constexpr std::int64_t kBoundMs = 2500 + 1000 + 500;
constexpr TimeNs kRepairMax = 5 * kSecond;

struct Options {
  FleetOptions fleet;
  double seconds = 600;
  std::uint64_t seed = 1;
  std::int64_t bound_ms = kBoundMs;
};

struct Fault {
  std::string what;
  std::function<void()> mend;
};

class Run {
 public:
  explicit Run(const Options& options)
      : options_(options), random_(options.seed), fleet_(options.fleet, options.seed) {}

  int run() {
    const TimeNs begun = clock_.now();
    const TimeNs end = begun + static_cast<TimeNs>(options_.seconds * 1e9);
    settle("the start", 30 * kSecond);
    for (TimeNs told = begun; clock_.now() < end && fleet_.problems().empty();) {
      live(draw(500) * kMillisecond);
      std::vector<Fault> faults;
      std::string names;
      for (std::uint32_t i = 0; i <= draw(2); ++i) {
        faults.push_back(break_something());
        names += (names.empty() ? "" : " and ") + faults.back().what;
        ++num_faults_[faults.back().what.substr(0, faults.back().what.find(':'))];
        live(draw(1000) * kMillisecond);
      }
      live((100 + draw(5000)) * kMillisecond);
      for (const Fault& fault : faults) fault.mend();
      settle(names, kRepairMax);
      if (clock_.now() - told > 10 * kSecond) {
        told = clock_.now();
        fmt::print(stderr, "{:4.0f} s, {} faults, {} answers judged, worst repair {:.2f} s\n", seconds_since(begun),
                   num_all(), fleet_.num_judged(), worst_repair_s_);
      }
    }
    for (const std::string& problem : fleet_.problems()) fmt::print("wrong: {}\n", problem);
    for (const auto& [what, num] : num_faults_) fmt::print("{:>6} x {}\n", num, what);
    fmt::print(
        "{:.0f} s, seed {}: {} faults, {} changes, {} answers judged, {} without an answer, oldest credit "
        "{:.2f} s, worst repair {:.2f} s (after {}), {} wrong\n",
        seconds_since(begun), options_.seed, num_all(), fleet_.num_changes(), fleet_.num_judged(),
        fleet_.num_unanswered(), static_cast<double>(fleet_.oldest_credit()) * 1e-9, worst_repair_s_, worst_,
        fleet_.problems().size() + num_unrepaired_);
    return fleet_.problems().empty() && num_unrepaired_ == 0 ? 0 : 1;
  }

 private:
  void live(TimeNs time) {
    for (const TimeNs end = clock_.now() + time; clock_.now() < end && fleet_.problems().empty();)
      fleet_.turn(true, options_.bound_ms * kMillisecond);
  }

  void settle(const std::string& after, TimeNs patience) {
    const TimeNs mended = clock_.now();
    const std::string wrong = fleet_.difference(patience);
    const double took_s = seconds_since(mended);
    if (!wrong.empty()) {
      ++num_unrepaired_;
      fmt::print("wrong: {:.1f} s after {}: {}\n", took_s, after, wrong);
      std::fflush(stdout);
    } else if (after != "the start" && took_s > worst_repair_s_) {
      worst_repair_s_ = took_s;
      worst_ = after;
    }
  }

  Fault break_something() {
    const std::uint32_t replica = draw(fleet_.num_replicas()), worker = draw(fleet_.num_workers());
    const auto link = [&](CutRelay::Way way, const char* what) {
      CutRelay* links = nullptr;
      if (draw(2) == 0) {  // one link, or all links of a worker
        links = &fleet_.link(worker, replica);
        links->set(way);
      } else {
        for (std::uint32_t i = 0; i < fleet_.num_replicas(); ++i) fleet_.link(worker, i).set(way);
      }
      return Fault{what, [this, worker] {
                     for (std::uint32_t i = 0; i < fleet_.num_replicas(); ++i)
                       fleet_.link(worker, i).set(CutRelay::Way::kOpen);
                   }};
    };
    switch (draw(9)) {
      case 0:
        fleet_.replica(replica).kill();
        return {"a controller is killed", [this, replica] {
                  if (!fleet_.replica(replica).is_running()) fleet_.replica(replica).start();
                }};
      case 1:
        fleet_.replica(replica).stop();
        return {"a controller's clock jumps (it is stopped)", [this, replica] { fleet_.replica(replica).go_on(); }};
      case 2:
        fleet_.replica(replica).limit_files(1);
        return {"a controller's disk is full", [this, replica] { fleet_.replica(replica).limit_files(0); }};
      case 3:
        return link(CutRelay::Way::kBroken, "a worker's links are broken");
      case 4:
        return link(CutRelay::Way::kCut, "a worker's links are cut");
      case 5:
        fleet_.kill_worker(worker);
        return {"a worker is killed", [this, worker] { fleet_.start_worker(worker); }};
      case 6:
        fleet_.kill_worker(worker);
        fleet_.start_worker(worker);
        return {"a worker restarts at once", [] {}};
      case 7:
        return of(fleet_.etcd(), "etcd");
      default:
        return of(fleet_.redis(), "Redis");
    }
  }

  Fault of(Program* engine, const std::string& name) {
    if (engine == nullptr) return break_something();
    if (draw(2) == 0) {
      engine->stop();
      return {name + " is stopped", [engine] { engine->go_on(); }};
    }
    engine->kill();
    return {name + " is killed", [engine] {
              if (!engine->is_running()) engine->start();
            }};
  }

  std::uint32_t draw(std::uint32_t below) { return static_cast<std::uint32_t>(random_() % below); }
  double seconds_since(TimeNs then) const { return static_cast<double>(clock_.now() - then) * 1e-9; }
  std::uint64_t num_all() const {
    std::uint64_t num = 0;
    for (const auto& entry : num_faults_) num += entry.second;
    return num;
  }

  Options options_;
  std::mt19937_64 random_;
  SteadyClock clock_;
  Fleet fleet_;
  std::map<std::string, std::uint64_t> num_faults_;
  double worst_repair_s_ = 0;
  std::string worst_ = "nothing";
  std::uint64_t num_unrepaired_ = 0;
};

int main_of(int argc, char** argv) {
  CLI::App app("Breaks a fleet of controllers in random ways and checks every answer against the truth.");
  Options options;
  bool without_etcd = false, without_redis = false;
  app.add_option("--kvferry", options.fleet.kvferry, "The binary")->required()->check(CLI::ExistingFile);
  app.add_option("--seconds", options.seconds, "For so long")->capture_default_str()->check(CLI::Range(1, 86400));
  app.add_option("--seed", options.seed, "Of the faults and of what workers do")->capture_default_str();
  app.add_option("--replicas", options.fleet.num_replicas, "Controllers")
      ->capture_default_str()
      ->check(CLI::Range(1, 9));
  app.add_option("--workers", options.fleet.num_workers, "Nodes with chunks")
      ->capture_default_str()
      ->check(CLI::Range(1, 64));
  app.add_option("--bound-ms", options.bound_ms, "A holder that is gone may be credited for so long")
      ->capture_default_str();
  app.add_flag("--without-etcd", without_etcd);
  app.add_flag("--without-redis", without_redis);
  CLI11_PARSE(app, argc, argv);
  options.fleet.with_etcd = !without_etcd;
  options.fleet.with_redis = !without_redis;
  std::string folder = (std::filesystem::temp_directory_path() / "kvferry-faults-XXXXXX").string();
  if (::mkdtemp(folder.data()) == nullptr) {
    fmt::print(stderr, "controller_faults: no folder for states and logs\n");
    return 1;
  }
  options.fleet.folder = folder;
  std::signal(SIGPIPE, SIG_IGN);
  const int status = Run(options).run();
  if (status == 0)
    std::filesystem::remove_all(folder);
  else
    fmt::print("logs are in {}\n", folder);
  return status;
}

}  // namespace
}  // namespace kvferry::faults

int main(int argc, char** argv) { return kvferry::faults::main_of(argc, argv); }
