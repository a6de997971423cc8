// The command `kvferry purge`.
#include <chrono>
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

using controller::NodeStatus;
using Clock = std::chrono::steady_clock;

constexpr double kPurgeTimeoutMaxS = 3600;
constexpr std::chrono::milliseconds kAskEvery{200};  // less than the second between two reports of a node

struct PurgeFlags {
  SettingFlags values;           // values of the flags that add_controller_option() has added
  std::string producer, member;  // one of the two is empty
  std::string name_space = "default";
  double timeout_s = 10;
  bool as_json = false;

  bool is_of_member() const { return !member.empty(); }
  const std::string& name() const { return is_of_member() ? member : producer; }
};

/// What the nodes of the namespace have reported about the purge with the number `id`.
struct Purged {
  std::uint64_t num_chunks = 0, num_bytes = 0;
  std::vector<const NodeStatus*> done, silent;  // nodes that have reported the end of the purge; nodes that have not
  std::vector<const NodeStatus*> lost;          // lost nodes; they get the order to purge when they register again

  Purged(const controller::Status& status, const std::string& name_space, std::uint64_t id) {
    for (const NodeStatus& node : status.nodes) {
      if (node.name_space != name_space) continue;
      const bool is_done = node.report && node.report->purge_id == id;
      (is_done ? done : silent).push_back(&node);
      num_chunks += is_done ? node.report->num_purged : 0;
      num_bytes += is_done ? node.report->purged_bytes : 0;
    }
    for (const controller::LostNode& one : status.lost)
      if (one.node.name_space == name_space) lost.push_back(&one.node);
  }
};

std::string mib_text(std::uint64_t bytes) { return fmt::format("{:.1f} MiB", static_cast<double>(bytes) / (1 << 20)); }

nlohmann::json ids_of(const std::vector<const NodeStatus*>& nodes) {
  nlohmann::json names = nlohmann::json::array();
  for (const NodeStatus* node : nodes) names.push_back(node->engine_id.value);
  return names;
}

void tell(const PurgeFlags& flags, const Purged& purged) {
  if (flags.as_json) {
    nlohmann::json object = {{"chunks", purged.num_chunks},
                             {"bytes", purged.num_bytes},
                             {"nodes", nlohmann::json::object()},
                             {"silent", ids_of(purged.silent)},
                             {"lost", ids_of(purged.lost)}};
    object[flags.is_of_member() ? "member" : "producer"] = flags.name();
    for (const NodeStatus* node : purged.done)
      object["nodes"][node->engine_id.value] = {{"chunks", node->report->num_purged},
                                                {"bytes", node->report->purged_bytes}};
    fmt::print("{}\n", object.dump(2, ' ', false, nlohmann::json::error_handler_t::replace));
    return;
  }
  for (const NodeStatus* node : purged.done)
    fmt::print("node '{}' dropped {} chunks, {}\n", node->engine_id, node->report->num_purged,
               mib_text(node->report->purged_bytes));
  for (const NodeStatus* node : purged.silent)
    fmt::print("node '{}' has not reported that it has dropped the chunks\n", node->engine_id);
  for (const NodeStatus* node : purged.lost)
    fmt::print("node '{}' is lost: it gets the order to drop the chunks when it registers again\n", node->engine_id);
  fmt::print(
      "{} chunks ({}) that came from {}'{}', directly or through others, were dropped on {} nodes; these nodes accept "
      "nothing more from it\n",
      purged.num_chunks, mib_text(purged.num_bytes), flags.is_of_member() ? "member " : "", flags.name(),
      purged.done.size());
  for (const auto* nodes : {&purged.done, &purged.silent, &purged.lost})
    for (const NodeStatus* node : *nodes)
      if (node->engine_id.value == flags.producer && !node->details.member.empty())
        fmt::print(
            "what member '{}', whose key node '{}' has, gave under other addresses stays; to drop it too: kvferry "
            "purge --member {}\n",
            node->details.member, node->engine_id, node->details.member);
}

Result<void> purge(const PurgeFlags& flags) {
  if (flags.name().empty())
    return Error{ErrorCode::kInvalidArgument, "--producer is required, or --member in its place"};
  const auto [endpoint, key] = KVFERRY_TRY(controller_of(flags.values));
  const controller::AdminCommand command{
      .verb = "purge",
      .name_space = flags.name_space,
      .engine_id = std::string(flags.is_of_member() ? controller::kMemberPrefix : "") + flags.name()};
  const controller::AdminResult ordered =
      KVFERRY_TRY(controller::run_admin_command(endpoint, command, kControllerTimeoutMs, key));
  const auto deadline = Clock::now() + std::chrono::duration<double>(flags.timeout_s);
  ProgressLine line;
  for (;;) {
    const controller::Status status = KVFERRY_TRY(controller::fetch_status(endpoint, kControllerTimeoutMs, key));
    const Purged purged(status, flags.name_space, ordered.number);
    line.show(purged.done.size(), purged.done.size() + purged.silent.size(), "nodes have dropped their chunks");
    if (purged.silent.empty()) {
      tell(flags, purged);
      return {};
    }
    if (Clock::now() > deadline) {
      tell(flags, purged);
      return Error{
          ErrorCode::kUnavailable,
          fmt::format(
              "{} nodes, the first of them '{}', have not reported within {} s (--timeout) that they have dropped the "
              "chunks; maybe their release is too old, they hang, or another purge came after this one; upgrade or "
              "restart such nodes, or give the command again",
              purged.silent.size(), purged.silent[0]->engine_id, flags.timeout_s)};
    }
    std::this_thread::sleep_for(kAskEvery);
  }
}

}  // namespace

Run add_purge_command(CLI::App& app) {
  auto flags = std::make_shared<PurgeFlags>();
  CLI::App* command = app.add_subcommand(
      "purge",
      "Remove what a bad node or member has spread: all nodes of its namespace drop the chunks that it computed or "
      "passed on, and what was computed from them, and accept nothing more from it. Prints how many chunks and bytes "
      "each node dropped.");
  add_controller_option(*command, flags->values);
  CLI::Option* producer =
      command->add_option("--producer", flags->producer,
                          "Engine id of the bad node, as `kvferry status` shows it; or its endpoint, if it left more "
                          "than ten minutes ago: tcp://HOST:PORT");
  command
      ->add_option("--member", flags->member,
                   "Name of the bad member, if members have keys of their own: drops what it gave under any address")
      ->excludes(producer);
  command->add_option("--namespace", flags->name_space, "Namespace of the node or of the member's nodes")
      ->capture_default_str();
  command->add_option("--timeout", flags->timeout_s, "Time to wait for the nodes' reports, in seconds")
      ->capture_default_str()
      ->check(number_between(0.1, kPurgeTimeoutMaxS));
  command->add_flag("--json", flags->as_json, "Print the result as one JSON object");
  return [flags] { return purge(*flags); };
}

}  // namespace kvferry::cli
