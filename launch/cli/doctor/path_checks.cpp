#include "launch/cli/doctor/path_checks.h"

#include <algorithm>
#include <map>
#include <set>
#include <string_view>
#include <utility>

#include "connector/core/flight_recorder.h"
#include "launch/cli/top/node_rows.h"
#include "transport/base/net/host_port.h"
#include "transport/base/net/this_host.h"
#include "transport/base/printable.h"

namespace kvferry::cli {
namespace {

using controller::FailureReport;
using controller::NodeStatus;
using controller::PathReport;
using controller::Status;
using Findings = std::vector<Finding>;  // findings without the check's name, which examine_paths() adds

constexpr double kShareMin = 0.5;  // a path whose best speed is a smaller share of its limit is reported
// Failures to reach a peer that are older than this are ignored: the peer's ports may have been opened since.
constexpr std::uint64_t kFailureMs = 600'000;
constexpr std::string_view kShm = "shm", kGpuIpc = "gpu_ipc", kTcp = "tcp", kUcxTcp = "ucx/tcp";

double share_of_path(const PathReport& path) {
  return path.limit_gb_per_s > 0 ? path.best_gb_per_s / path.limit_gb_per_s : 0;
}

/// A path between two registered nodes. `begins`: the node that begins the transfers and has reported the path.
struct Pair {
  const NodeStatus& begins;
  const NodeStatus& peer;
  const PathReport& path;
  std::string text() const {
    return fmt::format("{} {} {}", shown_name(begins), path.is_push ? "pushes to" : "pulls from", shown_name(peer));
  }
};

using Nodes = std::map<std::string_view, const NodeStatus*>;  // registered nodes by endpoint
Nodes nodes_of(const Status& status) {
  Nodes nodes;
  for (const NodeStatus& node : status.nodes) nodes.emplace(node.endpoint, &node);
  return nodes;
}

std::vector<Pair> pairs_of(const Status& status) {
  const Nodes nodes = nodes_of(status);
  std::vector<Pair> pairs;
  for (const NodeStatus& node : status.nodes) {
    if (!node.report) continue;
    for (const PathReport& path : node.report->paths)
      if (const auto peer = nodes.find(path.peer); peer != nodes.end()) pairs.push_back({node, *peer->second, path});
  }
  return pairs;
}

bool is_on_one_host(const NodeStatus& a, const NodeStatus& b) {
  if (!a.details.host.empty() && a.details.host == b.details.host) return true;
  const auto address_a = net::address_of_endpoint(a.endpoint), address_b = net::address_of_endpoint(b.endpoint);
  return address_a && address_b && address_a->host == address_b->host;
}

/// Finds slow paths between hosts. Paths within a host are left out, because the limit of shared memory is measured
/// with copies in the processor's caches, whose speed large pulls do not reach.
Findings check_speeds(const Status& status, const Host&) {
  Findings found;
  for (const Pair& pair : pairs_of(status)) {
    const double share = share_of_path(pair.path);
    const bool is_within_host =
        pair.path.path == kShm || pair.path.path == kGpuIpc || is_on_one_host(pair.begins, pair.peer);
    if (share == 0 || share >= kShareMin || is_within_host) continue;
    found.push_back(
        {.what = fmt::format("{} over {} slowly: the fastest of the last large pulls had {:.2f} GB/s, {:.0f} % of the "
                             "path's limit ({:.2f} GB/s)",
                             pair.text(), printable(pair.path.path), pair.path.best_gb_per_s, share * 100,
                             pair.path.limit_gb_per_s),
         .advice = "see what else uses the link, the memory or the cores of both hosts at the same time, and whether "
                   "the link has errors or a lower rate (ethtool, ibstat)",
         .is_hint = true});
  }
  return found;
}

Findings check_one_host(const Status& status, const Host&) {
  Findings found;
  for (const Pair& pair : pairs_of(status)) {
    if ((pair.path.path != kTcp && pair.path.path != kUcxTcp) || !is_on_one_host(pair.begins, pair.peer)) continue;
    found.push_back(
        {.what = fmt::format("{} over {}, although both are on one host", pair.text(), pair.path.path),
         .advice = "let both run as one user and see one /dev/shm (containers: --ipc=host, and --pid=host for pools in "
                   "GPU memory), and leave the setting path out; each node's log has the paths that it measured",
         .is_hint = true});
  }
  return found;
}

Findings check_ucx_paths(const Status& status, const Host& host) {
  if (!has_active_rdma(host)) return {};
  const std::string name = net::name_of_this_host();
  Findings found;
  for (const Pair& pair : pairs_of(status)) {
    const bool is_here = pair.begins.details.host == name || pair.peer.details.host == name;
    if (pair.path.path != kUcxTcp || !is_here || is_on_one_host(pair.begins, pair.peer)) continue;
    found.push_back(
        {.what = fmt::format("{} by UCX over TCP, although this host has an active RDMA port", pair.text()),
         .advice = "see that UCX_TLS and UCX_NET_DEVICES of both servers allow RDMA, that each container has "
                   "/dev/infiniband and may lock memory, that UCX was built with RDMA (ucx_info -d), and that the "
                   "other host has RDMA too"});
  }
  return found;
}

/// Returns whether transfers that the node began with the peer have moved bytes.
bool has_reached(const NodeStatus& node, const NodeStatus& peer) {
  return node.report && std::ranges::any_of(node.report->paths, [&](const PathReport& path) {
           return path.peer == peer.endpoint && path.bytes > 0;
         });
}

bool has_cause(const FailureReport& failure, Cause cause) {
  return failure.cause == kCauseNames[static_cast<std::size_t>(cause)];
}

/// Finds nodes that can't connect to a peer. A node connects to a peer when it begins a transfer with the peer, so only
/// failed transfers show that it can't.
Findings check_links(const Status& status, const Host&) {
  const Nodes nodes = nodes_of(status);
  Findings found;
  std::set<std::pair<const NodeStatus*, const NodeStatus*>> told;
  for (const NodeStatus& node : status.nodes) {
    if (!node.report) continue;
    for (const FailureReport& failure : node.report->failures) {
      const auto peer_at = nodes.find(failure.peer);
      const NodeStatus* const peer = peer_at == nodes.end() ? nullptr : peer_at->second;
      const bool is_of_link = has_cause(failure, Cause::kNoAnswer) || has_cause(failure, Cause::kLinkLost);
      if (peer == nullptr || !is_of_link || failure.ago_ms + node.report_age_ms > kFailureMs ||
          has_reached(node, *peer) || !told.emplace(&node, peer).second)
        continue;
      const bool is_one_way = has_reached(*peer, node);
      found.push_back(
          {.what = fmt::format("{} does not reach {}{}: {}", shown_name(node), shown_name(*peer),
                               is_one_way ? ", although that node reaches it" : "", printable(failure.what)),
           .advice = fmt::format("open the ports of {} (its setting `ports` says which it uses) for the host of {}{}",
                                 shown_name(*peer), shown_name(node),
                                 is_one_way ? "; a firewall seems to let one direction through" : "")});
    }
  }
  return found;
}

struct PathCheck {
  const char* name;
  Findings (*run)(const Status&, const Host&);
};
constexpr PathCheck kPathChecks[] = {{"path speeds", check_speeds},
                                     {"paths on one host", check_one_host},
                                     {"UCX over TCP", check_ucx_paths},
                                     {"links", check_links}};

}  // namespace

std::vector<PathSpeed> path_speeds(const Status& status) {
  const NodeNames names = names_of(status);
  std::vector<PathSpeed> speeds;
  for (const NodeStatus& node : status.nodes) {
    if (!node.report) continue;
    for (const PathReport& path : node.report->paths) {
      if (path.bytes == 0) continue;
      const PathEnds ends = ends_of(node, path, names);
      speeds.push_back({ends.from, ends.to, printable(path.path), path.is_push, path.last_gb_per_s, path.best_gb_per_s,
                        path.limit_gb_per_s, share_of_path(path)});
    }
  }
  std::ranges::stable_sort(speeds, {}, [](const PathSpeed& one) { return one.share > 0 ? one.share : 2; });
  return speeds;
}

std::vector<std::string> path_check_names() {
  std::vector<std::string> names;
  for (const PathCheck& check : kPathChecks) names.emplace_back(check.name);
  return names;
}

std::vector<Finding> examine_paths(const Status& status, const Host& host) {
  std::vector<Finding> found;
  for (const PathCheck& check : kPathChecks) {
    for (Finding& finding : check.run(status, host)) {
      finding.check = check.name;
      found.push_back(std::move(finding));
    }
  }
  return found;
}

}  // namespace kvferry::cli
