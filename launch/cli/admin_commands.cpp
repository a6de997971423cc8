// The commands `kvferry drain`, `kvferry clear` and `kvferry quota`.
#include <algorithm>
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
#include "launch/cli/progress_line.h"

namespace kvferry::cli {
namespace {

using controller::AdminCommand;
using controller::NodeStatus;
using Time = std::chrono::steady_clock;

constexpr double kDrainTimeoutMaxS = 604'800;               // largest value of --timeout: a week
constexpr std::uint64_t kQuotaMax = 1'000'000'000'000'000;  // largest quota, in chunks; no index has as many chunks
constexpr std::chrono::milliseconds kPollEvery{200};
// A drained node counts as ready to be stopped only after it was idle for this time, since proxies may still send
// requests to it.
constexpr std::chrono::milliseconds kIdleFor{1500};

struct Flags {
  SettingFlags values;  // values of the flags that add_controller_option() has added
  std::string node;
  std::string name_space = "default";  // the connector has the same default
  std::uint64_t number = 0;
  double timeout_s = 600;
  bool undo = false, no_wait = false, as_json = false, no_quota = false, force = false;
};

Result<controller::AdminResult> ask(const Flags& flags, AdminCommand command) {
  const auto [endpoint, key] = KVFERRY_TRY(controller_of(flags.values));
  command.name_space = flags.name_space;
  return controller::run_admin_command(endpoint, command, kControllerTimeoutMs, key);
}

Result<void> tell(const Flags& flags, const std::string& text, nlohmann::json object) {
  object["text"] = text;
  fmt::print("{}\n", flags.as_json ? object.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) : text);
  return {};
}

/// Waits until the node can be stopped, and returns the node's last status. Errors: kUnavailable after the timeout or
/// if the node has left or was lost; kRefused if another client has cancelled the drain; those of controller_of() and
/// fetch_status().
Result<NodeStatus> wait_drained(const Flags& flags) {
  const auto [endpoint, key] = KVFERRY_TRY(controller_of(flags.values));
  const auto deadline = Time::now() + std::chrono::duration<double>(flags.timeout_s);
  auto idle_since = Time::now();
  ProgressLine line;
  for (;;) {
    const controller::Status status = KVFERRY_TRY(controller::fetch_status(endpoint, kControllerTimeoutMs, key));
    const auto node = std::find_if(status.nodes.begin(), status.nodes.end(), [&](const NodeStatus& one) {
      return one.engine_id.value == flags.node && one.name_space == flags.name_space;
    });
    if (node == status.nodes.end())
      return Error{ErrorCode::kUnavailable,
                   fmt::format("node '{}' left, or the controller lost it, before its drain had ended; chunks that "
                               "only this node held may be gone",
                               flags.node)};
    if (!node->is_leaving)
      return Error{
          ErrorCode::kRefused,
          fmt::format(
              "another client has cancelled the drain of node '{}' (kvferry drain --undo), so the node stays in use",
              flags.node)};
    const std::uint64_t done = node->num_replicated + node->num_lost;
    line.show(done, done + node->num_to_replicate,
              fmt::format("chunks copied, {} requests still run on the node", node->load));
    if (node->load > 0) idle_since = Time::now();
    if (node->is_drained && Time::now() - idle_since >= kIdleFor) return *node;
    if (Time::now() > deadline)
      return Error{
          ErrorCode::kUnavailable,
          fmt::format("the drain of node '{}' has not ended within {} s (--timeout); the controller continues it",
                      flags.node, flags.timeout_s)};
    std::this_thread::sleep_for(kPollEvery);
  }
}

/// Checks that the node is not the last one for prefill or for decode in its namespace, where nodes that are draining
/// do not count. Errors: kRefused if it is; those of controller_of() and fetch_status().
Result<void> check_not_last(const Flags& flags) {
  const auto [endpoint, key] = KVFERRY_TRY(controller_of(flags.values));
  const controller::Status status = KVFERRY_TRY(controller::fetch_status(endpoint, kControllerTimeoutMs, key));
  constexpr std::pair<std::string_view, std::string_view> kKinds[] = {{"kv_producer", "prefill"},
                                                                      {"kv_consumer", "decode"}};
  for (const auto& [role, kind] : kKinds) {
    bool is_asked = false, has_other = false;
    for (const NodeStatus& node : status.nodes) {
      if (node.name_space != flags.name_space || (node.role != role && node.role != "kv_both")) continue;
      (node.engine_id.value == flags.node ? is_asked : has_other) |= !node.is_leaving;
    }
    if (is_asked && !has_other)
      return Error{
          ErrorCode::kRefused,
          fmt::format("node '{}' is the last node for {} in namespace '{}'; start another node first, or drain "
                      "this node with --force",
                      flags.node, kind, flags.name_space)};
  }
  return {};
}

Result<void> drain(const Flags& flags) {
  if (!flags.undo && !flags.force) KVFERRY_TRY(check_not_last(flags));
  const controller::AdminResult done =
      KVFERRY_TRY(ask(flags, {.verb = flags.undo ? "undrain" : "drain", .engine_id = flags.node}));
  if (flags.undo || flags.no_wait) return tell(flags, done.text, {{"node", flags.node}});
  const NodeStatus last = KVFERRY_TRY(wait_drained(flags));
  const std::string lost =
      last.num_lost == 0 ? "" : fmt::format(", {} could not be copied and remain only on this node", last.num_lost);
  return tell(flags, fmt::format("node '{}' can be stopped: {} chunks copied{}", flags.node, last.num_replicated, lost),
              {{"node", flags.node}, {"moved", last.num_replicated}, {"lost", last.num_lost}});
}

Result<void> clear(const Flags& flags) {
  const controller::AdminResult done = KVFERRY_TRY(ask(flags, {.verb = "clear", .engine_id = flags.node}));
  return tell(flags, done.text, {{"nodes", done.number}});
}

Result<void> quota(const Flags& flags) {
  const controller::AdminResult done =
      KVFERRY_TRY(ask(flags, {.verb = "quota", .number = flags.no_quota ? controller::kNoQuota : flags.number}));
  return tell(flags, done.text, {{"namespace", flags.name_space}});
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
  CLI::App* command =
      add(app, "drain",
          "Empty a node before it is stopped: lookups rank it last, and chunks that only this node holds "
          "are copied to other nodes. The command ends when the node can be stopped.",
          flags);
  command->add_option("NODE", flags->node, "Engine id of the node, as `kvferry status` shows it")->required();
  command->add_flag("--undo", flags->undo, "Cancel the drain of the node");
  command->add_flag("--force", flags->force,
                    "Drain the node even if it is the last node for prefill or for decode in its namespace");
  command->add_flag("--no-wait", flags->no_wait, "Return at once instead of waiting for the end of the drain");
  command->add_option("--timeout", flags->timeout_s, "Time to wait for the end of the drain, in seconds")
      ->capture_default_str()
      ->check(number_between(0.1, kDrainTimeoutMaxS));
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
  CLI::Option* number = command->add_option("CHUNKS", flags->number, "Maximum number of chunks")
                            ->check(number_between(std::uint64_t{0}, kQuotaMax));
  CLI::Option* none = command->add_flag("--none", flags->no_quota, "Remove the limit");
  number->excludes(none);
  command->callback([number, none] {
    if (number->empty() && none->empty()) throw CLI::RequiredError("CHUNKS or --none");
  });
  return [flags] { return quota(*flags); };
}

}  // namespace kvferry::cli
