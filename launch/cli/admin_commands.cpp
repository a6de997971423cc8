// The commands drain, clear and quota.
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <thread>

#include "controller/api/admin_command.h"
#include "controller/api/status.h"
#include "launch/cli/commands.h"
#include "launch/cli/controller_settings.h"

namespace kvferry::cli {
namespace {

using controller::AdminCommand;
using controller::NodeStatus;

constexpr std::int64_t kTimeoutMs = 2000;
constexpr std::chrono::milliseconds kPollEvery{200};
constexpr std::chrono::milliseconds kIdleFor{1500};  // a proxy may still send a request that it chose this node for

struct Flags {
  SettingFlags values;  // the controller
  std::string node;
  std::string name_space = "default";  // the connector's default
  std::uint64_t number = 0;
  double timeout_s = 600;
  bool undo = false, no_wait = false, as_json = false, no_quota = false;
};

void tell(const Flags& flags, const std::string& text, nlohmann::json object) {
  if (!flags.as_json) return fmt::print("{}\n", text);
  object["text"] = text;
  fmt::print("{}\n", object.dump(2, ' ', false, nlohmann::json::error_handler_t::replace));
}

/// A progress bar on a terminal; prints nothing elsewhere.
class ProgressLine {
 public:
  void show(std::uint64_t done, std::uint64_t all, std::string_view what) {
    if (!is_terminal_) return;
    constexpr std::uint64_t kWidth = 30;
    const std::uint64_t filled = all == 0 ? kWidth : done * kWidth / all;
    fmt::print(stderr, "\r[{:#<{}}{:.<{}}] {}/{} {}\x1b[K", "", filled, "", kWidth - filled, done, all, what);
    has_shown_ = true;
  }
  ~ProgressLine() {
    if (has_shown_) fmt::print(stderr, "\n");
  }

 private:
  bool is_terminal_ = ::isatty(STDERR_FILENO) != 0;
  bool has_shown_ = false;
};

/// Polls the controller's status until `is_over(nodes)` returns true. kUnavailable: the time is up.
template <class IsOver>
Result<void> wait_until(const std::string& endpoint, double timeout_s, const IsOver& is_over) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout_s);
  for (;;) {
    const Result<controller::Status> status = controller::fetch_status(endpoint, kTimeoutMs);
    if (!status) return status.error();
    const Result<bool> over = is_over(status->nodes);
    if (!over) return over.error();
    if (*over) return {};
    if (std::chrono::steady_clock::now() > deadline)
      return Error{ErrorCode::kUnavailable,
                   fmt::format("the drain has not ended within {} s; it continues", timeout_s)};
    std::this_thread::sleep_for(kPollEvery);
  }
}

Result<void> drain(const Flags& flags) {
  const Result<std::string> endpoint = controller_of(flags.values);
  if (!endpoint) return endpoint.error();
  const AdminCommand command{
      .verb = flags.undo ? "undrain" : "drain", .name_space = flags.name_space, .engine_id = flags.node};
  const Result<controller::AdminResult> done = controller::run_admin_command(*endpoint, command, kTimeoutMs);
  if (!done) return done.error();
  if (flags.undo || flags.no_wait) return tell(flags, done->text, {{"node", flags.node}}), Result<void>{};
  NodeStatus last;
  auto idle_since = std::chrono::steady_clock::now();
  {
    ProgressLine line;
    Result<void> waited =
        wait_until(*endpoint, flags.timeout_s, [&](const std::vector<NodeStatus>& nodes) -> Result<bool> {
          for (const NodeStatus& node : nodes) {
            if (node.engine_id.value != flags.node || node.name_space != flags.name_space) continue;
            if (!node.is_leaving) return Error{ErrorCode::kRefused, "the drain was cancelled by another client"};
            last = node;
            line.show(node.num_replicated + node.num_lost, node.num_replicated + node.num_lost + node.num_to_replicate,
                      fmt::format("chunks, {} requests left", node.load));
            const auto now = std::chrono::steady_clock::now();
            if (node.load > 0) idle_since = now;
            return node.is_drained && now - idle_since >= kIdleFor;
          }
          return Error{ErrorCode::kUnavailable, fmt::format("node '{}' left before it was drained", flags.node)};
        });
    if (!waited) return waited;
  }
  const std::string lost =
      last.num_lost == 0 ? "" : fmt::format(", {} could not be copied and are only there", last.num_lost);
  tell(flags, fmt::format("node '{}' can be stopped: {} chunks copied{}", flags.node, last.num_replicated, lost),
       {{"node", flags.node}, {"moved", last.num_replicated}, {"lost", last.num_lost}});
  return {};
}

Result<void> clear(const Flags& flags) {
  const Result<std::string> endpoint = controller_of(flags.values);
  if (!endpoint) return endpoint.error();
  const AdminCommand command{.verb = "clear", .name_space = flags.name_space, .engine_id = flags.node};
  const Result<controller::AdminResult> done = controller::run_admin_command(*endpoint, command, kTimeoutMs);
  if (!done) return done.error();
  tell(flags, done->text, {{"nodes", done->number}});
  return {};
}

Result<void> quota(const Flags& flags) {
  const Result<std::string> endpoint = controller_of(flags.values);
  if (!endpoint) return endpoint.error();
  const AdminCommand command{
      .verb = "quota", .name_space = flags.name_space, .number = flags.no_quota ? controller::kNoQuota : flags.number};
  const Result<controller::AdminResult> done = controller::run_admin_command(*endpoint, command, kTimeoutMs);
  if (!done) return done.error();
  tell(flags, done->text, {{"namespace", flags.name_space}});
  return {};
}

CLI::App* add(CLI::App& app, const char* name, const char* help, const std::shared_ptr<Flags>& flags) {
  CLI::App* command = app.add_subcommand(name, help);
  add_controller_option(*command, flags->values);
  command->add_option("--namespace", flags->name_space, "Namespace of the nodes")->capture_default_str();
  command->add_flag("--json", flags->as_json, "Print the result as one JSON object");
  return command;
}

}  // namespace

Run add_drain_command(CLI::App& app) {
  auto flags = std::make_shared<Flags>();
  CLI::App* command = add(app, "drain",
                          "Empty a node before it is stopped: lookups rank it last, and chunks that only it holds are "
                          "copied to other nodes. The command ends when the node can be stopped.",
                          flags);
  command->add_option("NODE", flags->node, "Engine id of the node, as `kvferry status` shows it")->required();
  command->add_flag("--undo", flags->undo, "Cancel a drain");
  command->add_flag("--no-wait", flags->no_wait, "Return at once instead of waiting for the end of the drain");
  command->add_option("--timeout", flags->timeout_s, "Time to wait, in seconds")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  return [flags] { return drain(*flags); };
}

Run add_clear_command(CLI::App& app) {
  auto flags = std::make_shared<Flags>();
  CLI::App* command = add(app, "clear", "Let all nodes of a namespace, or one of them, evict all their chunks", flags);
  command->add_option("--node", flags->node, "Engine id of the only node to clear");
  return [flags] { return clear(*flags); };
}

Run add_quota_command(CLI::App& app) {
  auto flags = std::make_shared<Flags>();
  CLI::App* command =
      add(app, "quota",
          "Limit the chunks of a namespace in the controller's index; lookups do not find chunks beyond "
          "the limit",
          flags);
  CLI::Option* number =
      command->add_option("CHUNKS", flags->number, "Maximum number of chunks")->check(CLI::NonNegativeNumber);
  CLI::Option* none = command->add_flag("--none", flags->no_quota, "Remove the limit");
  number->excludes(none);
  command->callback([number, none] {
    if (number->empty() && none->empty()) throw CLI::RequiredError("CHUNKS or --none");
  });
  return [flags] { return quota(*flags); };
}

}  // namespace kvferry::cli
