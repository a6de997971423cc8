// The command `kvferry doctor`.
#include <algorithm>
#include <cstdlib>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <string_view>

#include "connector/runtime/worker/pool_sizes.h"
#include "launch/cli/commands.h"
#include "launch/cli/controller_settings.h"
#include "launch/cli/doctor/deployment_checks.h"
#include "launch/cli/doctor/gpu_checks.h"
#include "launch/cli/doctor/host_checks.h"
#include "launch/cli/doctor/security_checks.h"
#include "launch/cli/top/node_rows.h"

namespace kvferry::cli {
namespace {

using Json = nlohmann::json;

struct DoctorOptions {
  std::uint64_t pool_bytes = 0;  // 0 stands for default_pool_bytes(), as in ConnectorConfig
};

std::span<const Setting<DoctorOptions>> doctor_settings() {
  static const Setting<DoctorOptions> settings[] = {
      setting<DoctorOptions, std::uint64_t>(
          "pool-bytes", &DoctorOptions::pool_bytes,
          "a number of bytes, or a string like \"512MiB\" or \"4GiB\"; 0: the default",
          "Size of the pool that each rank on this host allocates (environment variable KVFERRY_POOL_BYTES)")
          .with_shown_default(
              "what a server takes by itself: a sixteenth of the free memory, 1GiB to 16GiB; half, if less than "
              "2GiB are free")};
  return settings;
}

struct DoctorFlags {
  SettingFlags host, controller;
  bool security = false, as_json = false;
  std::string root = "/";
  std::vector<int> pids;

  /// Returns whether the user named a controller, by a flag or in the environment.
  bool has_controller() const {
    const char* const named = std::getenv("KVFERRY_CONTROLLER");
    return (named != nullptr && *named != '\0') ||
           std::ranges::any_of(controller, [](const SettingEntry& entry) { return entry.key == "controller"; });
  }
};

constexpr std::size_t kPathsShown = 20;

Json paths_json(const std::vector<PathSpeed>& speeds) {
  Json rows = Json::array();
  for (const PathSpeed& one : speeds)
    rows.push_back({{"from", one.from},
                    {"to", one.to},
                    {"by", one.is_push ? "push" : "pull"},
                    {"path", one.path},
                    {"last_gb_per_s", one.last_gb_per_s},
                    {"best_gb_per_s", one.best_gb_per_s},
                    {"limit_gb_per_s", one.limit_gb_per_s}});
  return rows;
}

void print_paths(const std::vector<PathSpeed>& speeds) {
  if (speeds.empty()) return;
  const auto number = [](double value) { return value > 0 ? fmt::format("{:.2f}", value) : "-"; };
  Table table{{"FROM", "TO", "BY", "PATH", "GB/S LAST", "GB/S BEST", "LIMIT", "SHARE"}};
  for (std::size_t i = 0; i < std::min(speeds.size(), kPathsShown); ++i) {
    const PathSpeed& one = speeds[i];
    table.push_back({one.from, one.to, one.is_push ? "push" : "pull", one.path.empty() ? "-" : one.path,
                     number(one.last_gb_per_s), number(one.best_gb_per_s), number(one.limit_gb_per_s),
                     one.share > 0 ? share_text(one.share) : "-"});
  }
  fmt::print("{}", table_text(table));
  if (speeds.size() > kPathsShown) fmt::print("and {} more paths; --json has all\n", speeds.size() - kPathsShown);
  fmt::print("\n");
}

std::string dumped(const Json& object) { return object.dump(2, ' ', false, Json::error_handler_t::replace); }

Result<void> run_security(const DoctorFlags& flags) {
  std::string controller;
  if (flags.has_controller()) controller = KVFERRY_TRY(controller_of(flags.controller)).endpoint;
  const SecurityReport report = examine_security(flags.pids, controller);
  if (flags.as_json) {
    fmt::print("{}\n", dumped({{"processes", report.num_processes}, {"weaknesses", report.weaknesses}}));
  } else {
    for (const std::string& sentence : report.weaknesses) fmt::print("{}\n", sentence);
    fmt::print("{} processes of kvferry, {} weaknesses\n", report.num_processes, report.weaknesses.size());
  }
  if (report.weaknesses.empty()) return {};
  return Error{ErrorCode::kRefused,
               fmt::format("found {} weaknesses; the output lists them", report.weaknesses.size())};
}

Result<void> run(const DoctorFlags& flags) {
  if (flags.security) return run_security(flags);
  const DoctorOptions options = KVFERRY_TRY(read_settings(doctor_settings(), {{}, ::getenv, flags.host}));
  std::vector<std::string> checks = host_check_names();
  Host host{.root = flags.root, .pool_bytes = options.pool_bytes};
  if (host.pool_bytes == 0) host.pool_bytes = default_pool_bytes(free_memory(host));
  std::vector<Finding> found = examine_host(host);
  std::vector<PathSpeed> speeds;
  if (flags.has_controller()) {
    const ControllerAddress controller = KVFERRY_TRY(controller_of(flags.controller));
    DeploymentReport report = examine_deployment(controller, host);
    for (Finding& finding : report.findings) found.push_back(std::move(finding));
    speeds = std::move(report.speeds);
    for (std::string& name : deployment_check_names()) checks.push_back(std::move(name));
  }
  std::ranges::stable_sort(found, {}, &Finding::is_hint);
  const auto num_hints = static_cast<std::size_t>(std::ranges::count(found, true, &Finding::is_hint));
  const std::size_t num_problems = found.size() - num_hints;
  if (flags.as_json) {
    Json rows = Json::array();
    for (const Finding& one : found)
      rows.push_back({{"check", one.check},
                      {"kind", one.is_hint ? "hint" : "problem"},
                      {"what", one.what},
                      {"advice", one.advice}});
    fmt::print("{}\n", dumped({{"checks", checks},
                               {"findings", rows},
                               {"gpus", nics_of_gpus(host)},
                               {"paths", paths_json(speeds)},
                               {"problems", num_problems}}));
  } else {
    for (const std::string& line : nics_of_gpus(host)) fmt::print("{}\n", line);
    print_paths(speeds);
    for (const Finding& one : found)
      fmt::print("{:<8} {}: {}.\n         To do: {}.\n", one.is_hint ? "hint" : "PROBLEM", one.check, one.what,
                 one.advice);
    fmt::print("{} checks, {} problems, {} hints\n", checks.size(), num_problems, num_hints);
  }
  if (num_problems == 0) return {};
  return Error{ErrorCode::kRefused, fmt::format("found {} problems; the output lists them", num_problems)};
}

}  // namespace

Run add_doctor_command(CLI::App& app) {
  CLI::App* const command = app.add_subcommand(
      "doctor",
      "Examine this host and, with --controller, a running deployment; say what is wrong and what to do. "
      "Exits with 1 if something is wrong; hints do not count.");
  const auto flags = std::make_shared<DoctorFlags>();
  add_setting_options(*command, doctor_settings(), flags->host);
  add_controller_option(*command, flags->controller);
  command->add_flag("--json", flags->as_json, "Print one JSON object instead of lines");
  command->add_flag(
      "--security", flags->security,
      "Instead print a sentence for each socket of this host's kvferry processes that other hosts reach "
      "without a cluster key, and for each key file that others can read. Root sees all users' processes");
  command->add_option("--pid", flags->pids, "With --security: the only processes to examine")
      ->check(number_between(1, std::numeric_limits<int>::max()));
  command->add_option("--root", flags->root, "Folder that contains the proc, sys, dev and etc of the host to examine");
  return [flags] { return run(*flags); };
}

}  // namespace kvferry::cli
