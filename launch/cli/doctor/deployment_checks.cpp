#include "launch/cli/doctor/deployment_checks.h"

#include <poll.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "controller/api/endpoint.h"
#include "controller/api/status.h"
#include "transport/base/fingerprint.h"
#include "transport/base/net/host_port.h"
#include "transport/base/net/tcp_socket.h"
#include "transport/base/versions.h"
#include "transport/base/wall_clock.h"

namespace kvferry::cli {
namespace {

using controller::NodeStatus;
using controller::Status;
using Findings = std::vector<Finding>;  // findings without the check's name, which examine_deployment() adds

constexpr std::int64_t kStatusMs = 2000;
constexpr int kConnectMs = 1500;
constexpr std::uint64_t kSilenceMs = 2000;       // a silence this long is reported; heartbeats come every 500 ms
constexpr std::uint64_t kRefusalMs = 3'600'000;  // a refusal that is older than this is reported as a hint
constexpr double kClockSeconds = 1;              // clocks that differ by more are reported
constexpr double kTicketSeconds = 600;           // tickets are refused if the signer's clock is behind by more

std::string name_of(const NodeStatus& node) { return fmt::format("node {}", node.engine_id.value); }

/// Returns why no connection to an address can be made, or an empty string if one can be made.
std::string why_unreachable(const net::HostPort& address) {
  const auto hosts = net::resolve(address.host);
  if (!hosts) return hosts.error().what;
  std::string why;
  for (const std::string& host : *hosts) {
    const auto socket = net::begin_connect_tcp({host, address.port});
    if (!socket) {
      why = socket.error().what;
      continue;
    }
    pollfd ready{socket->get(), POLLOUT, 0};
    if (::poll(&ready, 1, kConnectMs) == 0)
      why = fmt::format("no answer within {} ms; a firewall may drop the packets", kConnectMs);
    else
      why = net::connect_error(socket->get());
    if (why.empty()) return {};
  }
  return why;
}

/// Parses http://HOST[:PORT] and https://HOST[:PORT].
std::optional<net::HostPort> address_of_url(std::string_view url) {
  const bool is_tls = url.starts_with("https://");
  if (!is_tls && !url.starts_with("http://")) return std::nullopt;
  url.remove_prefix(is_tls ? 8 : 7);
  const auto address = net::parse_host_port(url.substr(0, url.find('/')), is_tls ? 443 : 80);
  return address ? std::optional(*address) : std::nullopt;
}

Findings check_roles(const Status& status, const std::string&) {
  std::map<std::string, std::set<std::string>> roles;  // roles of the nodes of each namespace
  for (const NodeStatus& node : status.nodes)
    if (!node.is_leaving) roles[node.name_space].insert(node.role);
  Findings found;
  if (roles.empty())
    found.push_back(
        {.what = "no node is registered", .advice = "start servers whose setting controller names this controller"});
  for (const auto& [name, there] : roles) {
    for (const auto& [role, kind] : {std::pair("kv_producer", "prefill"), std::pair("kv_consumer", "decode")}) {
      if (there.contains(role) || there.contains("kv_both") || there.contains("")) continue;
      found.push_back({.what = fmt::format("namespace {} has no node for {}", name, kind),
                       .advice = fmt::format("start one with kv_role {} or kv_both and this namespace", role)});
    }
  }
  return found;
}

Findings check_addresses(const Status& status, const std::string& controller) {
  Findings found;
  for (const NodeStatus& node : status.nodes) {
    const auto address = net::address_of_endpoint(node.endpoint);
    if (!address) continue;
    if (net::is_loopback(address->host) && controller::is_beyond_loopback(controller)) {
      found.push_back({.what = fmt::format("{} advertises the address {}, which other hosts can't reach", name_of(node),
                                           node.endpoint),
                       .advice = "set the node's advertise_host to an address that other hosts reach"});
    } else if (const std::string why = why_unreachable(*address); !why.empty()) {
      found.push_back(
          {.what = fmt::format("{} can't be reached at {}: {}", name_of(node), node.endpoint, why),
           .advice =
               "open the node's ports (its setting `ports` says which it uses), or set the node's advertise_host"});
    }
  }
  return found;
}

Findings check_servers(const Status& status, const std::string&) {
  Findings found;
  for (const NodeStatus& node : status.nodes) {
    if (node.serves.empty()) {
      found.push_back(
          {.what = fmt::format("{} does not say at which URL its server is, so launch/proxy sends it no requests",
                               name_of(node)),
           .advice = "set the node's setting serves, unless another router knows the node's server",
           .is_hint = true});
      continue;
    }
    const auto address = address_of_url(node.serves);
    const std::string why = address ? why_unreachable(*address) : "the address is not a URL such as http://HOST:PORT";
    if (!why.empty())
      found.push_back(
          {.what = fmt::format("the server of {} can't be reached at {}: {}", name_of(node), node.serves, why),
           .advice = "see whether vLLM has started; set the setting serves to a URL that routers reach"});
  }
  return found;
}

Findings check_heartbeats(const Status& status, const std::string&) {
  Findings found;
  for (const NodeStatus& node : status.nodes) {
    if (node.heartbeat_age_ms < kSilenceMs) continue;
    found.push_back({.what = fmt::format("{} has sent nothing for {:.1f} s, although heartbeats are due every 0.5 s",
                                         name_of(node), static_cast<double>(node.heartbeat_age_ms) / 1000),
                     .advice = "check whether the node's process is stopped or gets no processor time"});
  }
  return found;
}

Findings check_versions(const Status& status, const std::string&) {
  std::set<std::string> versions{status.version, std::string(version())};
  for (const NodeStatus& node : status.nodes)
    if (!node.version.empty()) versions.insert(node.version);
  if (versions.size() == 1) return {};
  return {{.what = fmt::format("nodes, controller and this command are of different releases of kvferry: {}",
                               fmt::join(versions, ", ")),
           .advice = "finish the upgrade, controllers first; kvferry status shows the release of each node",
           .is_hint = true}};
}

/// Returns the name in a fingerprint's field `model`, without the digest or revision of the weights.
std::string model_of(const NodeStatus& node) {
  const auto fields = fingerprint_fields(node.fingerprint);
  const auto model = fields.find("model");
  return model == fields.end() ? "" : model->second.substr(0, model->second.find_first_of("#@"));
}

Findings check_fingerprints(const Status& status, const std::string&) {
  Findings found;
  if (const std::uint64_t refused = status.counters.nodes_refused; refused > 0) {
    const bool is_known = !status.refusal.empty();
    found.push_back(
        {.what = fmt::format(
             "the controller has refused {} registrations{}", refused,
             is_known ? fmt::format("; the last one, {} s ago: {}", status.refusal_age_ms / 1000, status.refusal)
                      : ", and its log says why"),
         .advice = "correct what the refusal names; launch/docs/compatibility.md says what the nodes of a namespace "
                   "must have in common",
         .is_hint = !is_known || status.refusal_age_ms > kRefusalMs});
  }
  std::map<std::string, std::vector<const NodeStatus*>> models;  // for each model, one node of each namespace
  for (const NodeStatus& node : status.nodes) {
    const std::string model = model_of(node);
    std::vector<const NodeStatus*>& others = models[model];
    if (model.empty() || std::ranges::find(others, node.name_space, &NodeStatus::name_space) != others.end()) continue;
    if (!others.empty() && others.front()->fingerprint != node.fingerprint)
      found.push_back({.what = fmt::format("namespaces {} (here) and {} (there) serve the model {} and can't share KV: "
                                           "{}",
                                           others.front()->name_space, node.name_space, model,
                                           fingerprint_difference(others.front()->fingerprint, node.fingerprint)),
                       .advice = "if their servers should share KV, start them with equal options in one namespace",
                       .is_hint = true});
    others.push_back(&node);
  }
  return found;
}

/// `asked`, `answered`: times on this host's clock, before the controller was asked for its status and after it
/// answered.
Findings check_clocks(const Status& status, std::int64_t asked, std::int64_t answered) {
  Findings found;
  const auto compare = [&found](const std::string& whose, std::int64_t ahead_ms, std::string_view others) {
    const double seconds = std::abs(static_cast<double>(ahead_ms)) / 1000;
    if (seconds <= kClockSeconds) return;
    found.push_back({.what = fmt::format("the clock of {} is {:.1f} s {} that of {}", whose, seconds,
                                         ahead_ms > 0 ? "ahead of" : "behind", others),
                     .advice =
                         "synchronise the clocks of all hosts (chrony, systemd-timesyncd); a node refuses hand-offs "
                         "from nodes whose clocks are more than ten minutes behind its own",
                     .is_hint = seconds <= kTicketSeconds});
  };
  if (status.wall_ms > 0)  // a controller of an older release does not send its clock
    compare("the controller", status.wall_ms - std::clamp(status.wall_ms, asked, answered), "this host");
  for (const NodeStatus& node : status.nodes) compare(name_of(node), node.clock_ahead_ms, "the controller");
  return found;
}

Findings check_controller(const Status& status, const std::string&) {
  Findings found;
  if (!status.scale.etcd.empty() && !status.scale.etcd_ok)
    found.push_back({.what = "the controller does not reach etcd: " + status.scale.etcd_trouble,
                     .advice = "make etcd reachable; until then no replica joins or takes over"});
  if (!status.scale.event_log.empty() && !status.scale.log_ok)
    found.push_back(
        {.what = "the controller does not reach its event log: " + status.scale.log_trouble,
         .advice =
             "make the event log reachable; until then a replica that starts does not learn the chunks that other "
             "replicas know"});
  if (!status.state.folder.empty() && !status.state.durable)
    found.push_back({.what = "the controller can't keep its state: " + status.state.why_not,
                     .advice = fmt::format("see whether {} is full or read-only", status.state.folder)});
  if (status.state.folder.empty() && status.scale.etcd.empty())
    found.push_back({.what = "the controller keeps no state, so quotas and drains end when the controller stops",
                     .advice = "start the controller with --state FOLDER",
                     .is_hint = true});
  if (status.insecure)
    found.push_back({.what = "other hosts reach the controller without a cluster key",
                     .advice = "make a cluster key with kvferry keygen, and see launch/docs/deployment.md"});
  return found;
}

constexpr const char* kClocks = "clocks";  // not in the table below, because check_clocks() needs other arguments
struct DeploymentCheck {
  const char* name;
  Findings (*run)(const Status&, const std::string& controller);
};
constexpr DeploymentCheck kDeploymentChecks[] = {
    {"controller", check_controller},     {"roles", check_roles},           {"addresses", check_addresses},
    {"servers", check_servers},           {"heartbeats", check_heartbeats}, {"versions", check_versions},
    {"fingerprints", check_fingerprints},
};

}  // namespace

std::vector<std::string> deployment_check_names() {
  std::vector<std::string> names;
  for (const DeploymentCheck& check : kDeploymentChecks) names.emplace_back(check.name);
  names.emplace_back(kClocks);
  for (std::string& name : path_check_names()) names.push_back(std::move(name));
  return names;
}

DeploymentReport examine_deployment(const ControllerAddress& controller, const Host& host) {
  const std::int64_t asked = wall_clock_ms();
  const auto status = controller::fetch_status(controller.endpoint, kStatusMs, controller.key);
  const std::int64_t answered = std::max(asked, wall_clock_ms());
  if (!status)
    return {
        .findings = {{.check = "controller",
                      .what = status.error().what,
                      .advice = controller.key ? "check that the controller runs and has the same cluster key"
                                               : "check that the controller runs, and whether it needs a cluster key "
                                                 "(KVFERRY_CLUSTER_KEY_FILE)"}}};
  std::vector<Finding> found;
  for (const DeploymentCheck& check : kDeploymentChecks) {
    for (Finding& finding : check.run(*status, controller.endpoint)) {
      finding.check = check.name;
      found.push_back(std::move(finding));
    }
  }
  for (Finding& finding : check_clocks(*status, asked, answered)) {
    finding.check = kClocks;
    found.push_back(std::move(finding));
  }
  for (Finding& finding : examine_paths(*status, host)) found.push_back(std::move(finding));
  return {std::move(found), path_speeds(*status)};
}

}  // namespace kvferry::cli
