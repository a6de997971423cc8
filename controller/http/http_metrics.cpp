#include "controller/http/http_metrics.h"

#include <algorithm>

#include "transport/base/check.h"

namespace kvferry::controller {
namespace {

struct MetricRow {
  std::string_view name, type, help;
};

/// All metrics of a controller, in the order in which they are written. launch/docs/metrics.md has the same texts.
constexpr MetricRow kMetrics[] = {
    {"chunks_dropped_total", "counter",
     "Published chunks that were not stored because of a limit or quota (alert KvferryIndexFull)"},
    {"chunks_evicted_total", "counter",
     "Chunks that nodes reported as evicted, including those that the index did not have"},
    {"chunks_published_total", "counter",
     "Chunks that nodes published, including those that the index had already; its rate shows how fast new KV is "
     "saved"},
    {"digests_differed_total", "counter",
     "Heartbeats whose digest differed from the index, after which a node is asked for a snapshot; a rate above 0 "
     "means lost messages or a fault"},
    {"drain_chunks_left", "gauge",
     "While a node is drained: its chunks that are still to be checked for a copy on another node, or to be "
     "replicated"},
    {"drain_chunks_lost", "gauge", "While a node is drained: chunks that no other node took within three tries"},
    {"engine_batches_malformed_total", "counter",
     "Batches of an engine's KV events that can't be read or are of a rank beyond the first 64"},
    {"engine_batches_total", "counter",
     "Batches of an engine's KV events that were applied; does not grow while the engine is idle or unreachable"},
    {"engine_blocks", "gauge", "Blocks of an engine in the index, by rank and tier"},
    {"engine_clears_total", "counter", "Times that the engine cleared its cache"},
    {"engine_confirmed", "gauge",
     "1 if the engine is live and no replay of missed KV events is running or will be tried again, else 0: its blocks "
     "in the index may be out of date"},
    {"engine_connected", "gauge", "1 if there is a connection to the engine's event socket, else 0"},
    {"engine_duplicates_total", "counter",
     "Batches of an engine's KV events that were skipped because they had been applied before"},
    {"engine_events_malformed_total", "counter", "KV events of an engine that can't be read"},
    {"engine_events_total", "counter", "KV events of an engine that were applied"},
    {"engine_events_unknown_total", "counter", "KV events of an engine whose kind this release does not know"},
    {"engine_gaps_total", "counter", "Times that batches of an engine's KV events were missing"},
    {"engine_gaps_unrepaired_total", "counter",
     "Gaps in an engine's KV events that no replay filled, so that all its blocks were dropped; with a replay "
     "endpoint, only if the replay starts too late or the endpoint does not answer in time"},
    {"engine_live", "gauge",
     "1 if queries count the engine's blocks; 0 if the engine was silent or disconnected for more than 3 s, and with a "
     "replay endpoint also after a reconnect, until a replay is answered or given up"},
    {"engine_losses_total", "counter",
     "Times that engine_live became 0, because the engine was silent or disconnected"},
    {"engine_messages_malformed_total", "counter", "Messages of all engines that can't be read"},
    {"engine_replays_total", "counter",
     "Replays of KV events that the controller requested, including retries and requests that only check whether the "
     "engine lives"},
    {"engine_restarts_total", "counter", "Times that the engine restarted"},
    {"engine_silent_seconds", "gauge", "Time since the engine's last message"},
    {"engines", "gauge",
     "Registered engines; an engine whose data parallel ranks are registered one by one counts once for each"},
    {"etcd_up", "gauge", "With --etcd: 1 if the controller reaches etcd, else 0 (alert KvferryEtcdDown)"},
    {"event_log_up", "gauge",
     "With --event-log: 1 if the controller reaches the event log, else 0 (alert KvferryEventLogDown)"},
    {"handshakes_refused_total", "counter",
     "Connections refused because the peer lacks the cluster key, probes included (alert KvferryNodesWithoutKey)"},
    {"heartbeats_total", "counter", "Heartbeats of nodes; each node sends two a second, and more under load"},
    {"held_keys", "gauge", "Old name of kvferry_controller_pinned_keys"},
    {"http_refused_total", "counter", "HTTP requests without the token that they need (alert KvferryNodesWithoutKey)"},
    {"index_blocks", "gauge", "Blocks in a model's index; a block counts once for each rank and tier that has it"},
    {"index_blocks_dropped_total", "counter",
     "Blocks that were not indexed because the limit on the blocks of a rank or of the index was reached"},
    {"index_blocks_removed_total", "counter",
     "Blocks that engines removed, including those that the index did not have"},
    {"index_blocks_stored_total", "counter", "Blocks that engines stored, including those that the index had already"},
    {"index_blocks_unplaced_total", "counter",
     "Blocks without tokens or with an unknown parent, which can be found by their hash only"},
    {"index_hashes", "gauge", "Block hashes of engines in a model's index"},
    {"index_hashes_ambiguous_total", "counter",
     "Times that an engine stored a block under a hash that was in use for another block"},
    {"index_other_block_size_total", "counter",
     "KV events whose block size differs from the registered one, so that their blocks are not indexed"},
    {"index_other_group_total", "counter", "KV events of layer groups that are not indexed"},
    {"info", "gauge", "Always 1; the label is the controller's release"},
    {"lookup_hits_total", "counter", "Lookups of nodes for which at least one holder was found"},
    {"lookup_keys_total", "counter", "Keys of full chunks in lookups"},
    {"lookups_total", "counter", "Lookups of nodes; a node sends one for each prompt whose KV it lacks"},
    {"messages_forbidden_total", "counter",
     "Messages refused because the sender's member key was revoked or its role does not allow them"},
    {"messages_malformed_total", "counter", "Messages that can't be read (alert KvferryProtocolBroken)"},
    {"messages_sent_total", "counter", "Replies and orders that were sent"},
    {"messages_taken_total", "counter", "Messages of all kinds that were received; its rate is the controller's load"},
    {"messages_unregistered_total", "counter",
     "Messages of nodes that are not registered; grows for a moment after a restart of the controller"},
    {"node_chunks", "gauge", "Chunks that the node holds, tails included"},
    {"node_info", "gauge", "Always 1; the label is the node's release, which old releases do not report"},
    {"node_load", "gauge", "Requests on the node in its last heartbeat; /pair spreads requests by it"},
    {"node_silent_seconds", "gauge",
     "Time since the node's last message; at --lease-ms (2.5 s by default) the node is lost"},
    {"node_tails", "gauge", "Tails among node_chunks: last chunks of requests, shorter than chunk_tokens"},
    {"nodes", "gauge", "Registered nodes of all namespaces, draining ones included"},
    {"nodes_expired_total", "counter",
     "Nodes that were lost because they fell silent without leaving (alert KvferryNodeLost)"},
    {"nodes_fenced_total", "counter",
     "Nodes that were replaced by a newer process of the same engine id, as when they restart"},
    {"nodes_refused_total", "counter", "Registrations of nodes that were refused (alert KvferryNodeRefused)"},
    {"nodes_registered_total", "counter",
     "Registrations of nodes, without those that a node repeats after a lost connection"},
    {"orders_sent_total", "counter",
     "Orders to pin, unpin, replicate, evict and purge that were sent to nodes, as for drains, moves and kvferry "
     "clear"},
    {"peers_delayed_total", "counter",
     "Times that messages of a stream waited because it had used its share of a turn and others waited too, or that a "
     "member over its share got no answer but an empty one; grows fast while a peer floods the controller"},
    {"pinned_keys", "gauge", "Chunks that nodes may not evict, by order of the controller"},
    {"replicas", "gauge",
     "With --etcd or --event-log: live replicas that this one knows, itself included; below the number that you "
     "started, one is missing"},
    {"replies_dropped_total", "counter",
     "Replies and orders that were dropped because the connection was gone or the peer did not read, as when a node "
     "hangs or has ended"},
    {"reports_malformed_total", "counter",
     "Reports of nodes for the status page that were dropped because they can't be read; the nodes are served as "
     "before"},
    {"resends_wanted_total", "counter", "Times that a node was asked to send messages again that were lost"},
    {"snapshots_wanted_total", "counter",
     "Times that a registered node was asked to publish all chunks that it holds, for a drain or because messages were "
     "lost or its digest differed"},
    {"state_durable", "gauge",
     "With a state folder: 1 if the folder has all changes that the controller acknowledged; 0 if its log could not be "
     "written or a file was damaged, until the next snapshot is complete (alert KvferryStateNotOnDisk); absent with "
     "--state none"},
    {"state_log_bytes", "gauge", "With a state folder: size of the log that a restart reads after the snapshot"},
    {"state_snapshot_bytes", "gauge", "With a state folder: size of the newest snapshot; 0 before the first"},
    {"transfer_bytes_total", "counter",
     "Bytes that the node has pulled from the peer or pushed to it; can begin at 0 again for a pair that was long "
     "unused; at most 1000 pairs are shown"},
    {"transfer_failed_chunks_total", "counter",
     "Chunks that the node failed to pull from the peer or to push to it; shows which pair to examine"},
    {"up_seconds", "gauge", "Time since the controller's start; a decrease means a restart"},
};

std::string label_value(const std::string& text) {
  std::string safe;
  for (const char c : text) {
    if (c == '\\' || c == '"') safe += '\\';
    safe += c == '\n' ? ' ' : c;
  }
  return safe;
}

}  // namespace

void Metrics::add(const std::string& name, double value, const Labels& labels) {
  const auto [found, is_new] = samples_.try_emplace(name);
  KVFERRY_CHECK(!is_new || std::ranges::find(kMetrics, name, &MetricRow::name) != std::end(kMetrics),
                "metric kvferry_controller_{} has no row in the table of metrics", name);
  std::string& samples = found->second;
  samples += "kvferry_controller_" + name;
  for (std::size_t i = 0; i < labels.size(); ++i)
    samples += fmt::format("{}{}=\"{}\"", i == 0 ? "{" : ",", labels[i].first, label_value(labels[i].second));
  samples += fmt::format("{} {}\n", labels.empty() ? "" : "}", value);
}

std::string Metrics::text() const {
  std::string all;
  for (const MetricRow& metric : kMetrics) {
    all += fmt::format("# HELP kvferry_controller_{0} {1}\n# TYPE kvferry_controller_{0} {2}\n", metric.name,
                       metric.help, metric.type);
    if (const auto found = samples_.find(metric.name); found != samples_.end()) all += found->second;
  }
  return all;
}

}  // namespace kvferry::controller
