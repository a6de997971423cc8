// kvferry_sim --schedules N [--seed S] [--jobs J] [--json FILE] [--expect-all], or --replay SEED: runs schedules of the
// simulator on all cores. Exits with status 1 if a promise was broken, with 130 if it was interrupted.
#include <signal.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <fstream>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <thread>

#include "check_throws.h"
#include "promises_check.h"
#include "schedule.h"
#include "schedule_log.h"
#include "transport/base/clock.h"

namespace {

using namespace kvferry;
using namespace kvferry::sim;

// Lines of the tally that may be 0 after 30,000 schedules, and the number of schedules after which they may not.
constexpr std::array<std::string_view, 3> kRare = {"excused_time_over", "excused_behind", "excused_pulled"};
constexpr std::size_t kSchedulesForRare = 1'000'000;
constexpr double kHangSeconds = 60;                 // limit on one schedule, which usually takes milliseconds
constexpr std::uint64_t kSchedulesForAll = 30'000;  // in this many schedules, everything that can happen does happen

struct Failure {
  std::uint64_t seed = 0;
  std::string promise, message;
};

volatile sig_atomic_t g_interrupted = 0;
extern "C" void on_interrupt(int) { g_interrupted = 1; }

// The seed of this thread's schedule. It is reported after a crash of the code under test too.
thread_local volatile std::uint64_t t_seed = 0;
extern "C" void on_crash(int number) {
  char text[160];
  const int size =
      std::snprintf(text, sizeof text,
                    "\nbroken promise: no-engine-death\n  seed %llu: ended by signal %d\n"
                    "  replay: tests/sim/run --replay %llu\n",
                    static_cast<unsigned long long>(t_seed), number, static_cast<unsigned long long>(t_seed));
  if (::write(STDERR_FILENO, text, static_cast<std::size_t>(size)) < 0) ::_exit(3);
  ::signal(number, SIG_DFL);
  ::raise(number);
}

std::optional<Failure> run_one(std::uint64_t seed, Tally& tally) {
  t_seed = seed;
  try {
    tally.add(run_schedule(seed));
    return std::nullopt;
  } catch (const std::exception& broken) {
    return Failure{seed, promise_of(broken.what()), broken.what()};
  }
}

std::string replay_command(std::uint64_t seed) { return fmt::format("tests/sim/run --replay {}", seed); }

void print_failure(const Failure& failure) {
  fmt::print(stderr, "broken promise: {}\n  seed {}: {}\n  replay: {}\n", failure.promise, failure.seed,
             failure.message, replay_command(failure.seed));
}

/// A progress bar. It is drawn only on a terminal.
class Bar {
 public:
  explicit Bar(std::uint64_t total) : total_(total), is_terminal_(::isatty(STDERR_FILENO) == 1) {}
  ~Bar() {
    if (is_terminal_) fmt::print(stderr, "\r\033[K");
  }
  void draw(std::uint64_t done, double seconds) const {
    if (!is_terminal_) return;
    constexpr std::uint64_t kWidth = 24;
    const std::uint64_t filled = kWidth * done / total_;
    const double left = done == 0 ? 0 : seconds / static_cast<double>(done) * static_cast<double>(total_ - done);
    fmt::print(stderr, "\r\033[K[{:#<{}}{:.<{}}] {} of {} schedules, {:.0f} s left", "", filled, "", kWidth - filled,
               done, total_, left);
  }

 private:
  std::uint64_t total_;
  bool is_terminal_;
};

struct Run {
  std::uint64_t num_wanted = 0, first_seed = 1;
  unsigned jobs = 1;
  std::uint64_t num_done = 0;
  double seconds = 0;
  Tally tally;
  std::optional<Failure> failure;
  bool is_interrupted = false;
};

/// Runs all schedules. Threads take seeds in small batches until all seeds are done, a schedule fails or the user
/// interrupts.
void run_all(Run& run) {
  std::atomic<std::uint64_t> next = 0, done = 0;
  std::atomic<bool> stop = false;
  std::mutex mutex;
  // for each thread, the index of its current schedule plus 1
  std::vector<std::atomic<std::uint64_t>> current(run.jobs);
  const auto work = [&](unsigned job) {
    Tally tally;
    constexpr std::uint64_t kBatch = 16;
    while (!stop && g_interrupted == 0) {
      const std::uint64_t first = next.fetch_add(kBatch);
      for (std::uint64_t i = first; i < std::min(first + kBatch, run.num_wanted) && !stop && g_interrupted == 0; ++i) {
        current[job] = i + 1;
        if (const std::optional<Failure> failure = run_one(run.first_seed + i, tally)) {
          const std::lock_guard lock(mutex);
          if (!run.failure || failure->seed < run.failure->seed) run.failure = failure;
          stop = true;
        }
        done += 1;
      }
      if (first + kBatch >= run.num_wanted) break;
    }
    current[job] = 0;
    const std::lock_guard lock(mutex);
    run.tally.add(tally);
  };
  const SteadyClock clock;
  const TimeNs started = clock.now();
  std::vector<std::thread> threads;
  for (unsigned job = 0; job < run.jobs; ++job) threads.emplace_back(work, job);
  const Bar bar(run.num_wanted);
  std::vector<std::pair<std::uint64_t, TimeNs>> since(run.jobs, {0, started});
  const auto busy = [&] {
    return std::any_of(current.begin(), current.end(), [](const auto& at) { return at != 0; }) || next == 0;
  };
  while (busy()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    const TimeNs now = clock.now();
    bar.draw(done, static_cast<double>(now - started) * 1e-9);
    for (unsigned job = 0; job < run.jobs; ++job) {
      const std::uint64_t at = current[job];
      if (at != since[job].first) since[job] = {at, now};
      if (at == 0 || static_cast<double>(now - since[job].second) * 1e-9 < kHangSeconds) continue;
      print_failure({run.first_seed + at - 1, "no-engine-death", fmt::format("hangs for {} s", kHangSeconds)});
      std::_Exit(1);
    }
  }
  for (std::thread& thread : threads) thread.join();
  run.seconds = static_cast<double>(clock.now() - started) * 1e-9;
  run.num_done = done;
  run.is_interrupted = g_interrupted != 0;
}

void print_tally(const Tally& tally) {
  for (const Tally::Line& line : tally.lines()) fmt::print("{:>14}  {}\n", line.count, line.what);
}

nlohmann::json to_json(const Run& run) {
  nlohmann::json counters;
  for (const Tally::Line& line : run.tally.lines()) counters[line.name] = line.count;
  nlohmann::json json = {{"schedules", run.num_done},
                         {"first_seed", run.first_seed},
                         {"jobs", run.jobs},
                         {"seconds", run.seconds},
                         {"schedules_per_s", static_cast<double>(run.num_done) / std::max(run.seconds, 1e-9)},
                         {"interrupted", run.is_interrupted},
                         {"broken", nlohmann::json::array()},
                         {"counters", counters}};
  if (run.failure) {
    json["broken"].push_back({{"promise", run.failure->promise},
                              {"seed", run.failure->seed},
                              {"message", run.failure->message},
                              {"replay", replay_command(run.failure->seed)}});
  }
  return json;
}

int replay(std::uint64_t seed, std::size_t num_lines) {
  ScheduleLog log(num_lines);
  listener = &log;
  Tally tally;
  const std::optional<Failure> failure = run_one(seed, tally);
  for (const std::string& line : log.lines()) fmt::print("{}\n", line);
  std::fflush(stdout);
  if (failure) print_failure(*failure);
  fmt::print("1 schedules, {} broken promises\n", failure ? 1 : 0);
  return failure ? 1 : 0;
}

int report(const Run& run, const std::string& json_file, bool expects_all) {
  print_tally(run.tally);
  fmt::print("{:.1f} s on {} threads, {:.0f} schedules/s\n", run.seconds, run.jobs,
             static_cast<double>(run.num_done) / std::max(run.seconds, 1e-9));
  std::fflush(stdout);
  bool ok = !run.failure;
  if (run.failure) print_failure(*run.failure);
  if (expects_all && !run.failure && !run.is_interrupted) {
    for (const Tally::Line& line : run.tally.lines()) {
      const bool is_rare = std::ranges::count(kRare, std::string_view(line.name)) > 0;
      if (line.count > 0 || (is_rare && run.num_wanted < kSchedulesForRare)) continue;
      fmt::print(stderr, "never happened: {} ({})\n", line.what, line.name);
      ok = false;
    }
  }
  if (!json_file.empty()) {
    std::ofstream file(json_file);
    file << to_json(run).dump(2) << "\n";
    if (!file.flush()) {
      fmt::print(stderr, "kvferry_sim: can't write {}\n", json_file);
      ok = false;
    }
  }
  if (run.is_interrupted) fmt::print("interrupted\n");
  fmt::print("{} schedules, {} broken promises\n", run.num_done, run.failure ? 1 : 0);
  if (run.is_interrupted && ok) return 130;
  return ok ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Runs the real connector cores in simulated clusters and asserts every promise after every step.",
               "kvferry_sim");
  Run run;
  run.jobs = std::max(1u, std::thread::hardware_concurrency());
  std::string json_file;
  bool expects_all = false;
  std::uint64_t replayed = 0;
  std::size_t num_lines = 60;
  const CLI::Option* replay_option =
      app.add_option("--replay", replayed, "run one schedule again and print its last events");
  app.add_option("--lines", num_lines, "how many of them");
  app.add_option("--schedules", run.num_wanted, "how many schedules to run")->check(CLI::Range(1, 1000000000));
  app.add_option("--seed", run.first_seed, "of the first schedule; the next ones count up");
  app.add_option("--jobs", run.jobs, "threads; default: all cores")->check(CLI::Range(1, 1024));
  app.add_option("--json", json_file, "write the counts to this file");
  app.add_flag("--expect-all", expects_all,
               "fail if something that can happen never did; always with 30000 schedules or more");
  try {
    app.parse(argc, argv);
    if (!*replay_option && run.num_wanted == 0)
      throw CLI::ValidationError("--schedules N or --replay SEED says what to run");
  } catch (const CLI::CallForHelp& help) {
    return app.exit(help);
  } catch (const CLI::ParseError& error) {
    fmt::print(stderr, "kvferry_sim: {}\n", error.what());
    return 2;
  }
  const ChecksThrow checks;
  for (const int number : {SIGSEGV, SIGABRT, SIGBUS, SIGFPE, SIGILL}) ::signal(number, on_crash);
  if (*replay_option) return replay(replayed, num_lines);
  struct sigaction action {};
  action.sa_handler = on_interrupt;
  for (const int number : {SIGINT, SIGTERM}) ::sigaction(number, &action, nullptr);
  run_all(run);
  return report(run, json_file, expects_all || run.num_wanted >= kSchedulesForAll);
}
