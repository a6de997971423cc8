#include "controller/scale/log_reader.h"

#include "controller/protocol/wire.h"

namespace kvferry::controller::scale {
namespace {

/// Above all sequence numbers of nodes, so that a node's own Hello restarts its count and triggers a snapshot.
constexpr std::uint64_t kFirstSequence = std::uint64_t{1} << 62;

}  // namespace

void LogReader::apply(std::string_view bytes, TimeNs now) {
  const Result<LogEntry> entry = decode<LogEntry>(bytes, "entry of the event log");
  if (!entry || entry->version != 1) {
    ++num_malformed_;
    return;
  }
  for (const LogRecord& record : entry->records) apply(entry->writer, record, now);
}

void LogReader::apply(const std::string& writer, const LogRecord& record, TimeNs now) {
  if (static_cast<LogKind>(record.kind) == LogKind::kHole) {
    // The nodes' missing messages are unknown; wait for the nodes' own Hellos.
    while (!nodes_.empty()) {
      const NodeId id = nodes_.begin()->second.id;
      nodes_.erase(nodes_.begin());
      directory_.leave(id);
    }
    return;
  }
  if (static_cast<LogKind>(record.kind) == LogKind::kHello) return hello(writer, record, now);
  const auto known = nodes_.find({record.name_space, record.engine_id});
  if (known == nodes_.end() || known->second.incarnation != record.incarnation) return;
  if (static_cast<LogKind>(record.kind) == LogKind::kGone) {
    const NodeId id = known->second.id;
    nodes_.erase(known);
    directory_.leave(id);
  } else if (known->second.writer == writer) {
    update(known->second, record, now);
  }
}

void LogReader::hello(const std::string& writer, const LogRecord& record, TimeNs now) {
  Result<wire::FromNode> message = wire::parse<wire::FromNode>(record.bytes);
  const auto* hello = message ? std::get_if<wire::Hello>(&*message) : nullptr;
  if (hello == nullptr) {
    ++num_malformed_;
    return;
  }
  const NodeInfo& info = hello->node;
  const NodeName name{info.name_space, info.engine_id.value};
  const auto known = nodes_.find(name);
  if (known == nodes_.end() && directory_.find_node(name.name_space, name.engine_id))
    return;  // the node sent its own Hello to this replica
  if (known != nodes_.end() && known->second.incarnation == info.incarnation.value) {
    known->second.writer = writer;
    known->second.expected = hello->next_sequence;
    return;
  }
  if (!may_join_(info)) return;
  const Result<Joined> joined = directory_.join(info, kFirstSequence, now);
  if (!joined) return;  // a newer incarnation is registered, or the directory is full
  nodes_[name] = {joined->id, info.incarnation.value, writer, hello->next_sequence, kFirstSequence};
}

void LogReader::update(Node& node, const LogRecord& record, TimeNs now) {
  if (record.sequence < node.expected) return;
  Result<wire::FromNode> message = wire::parse<wire::FromNode>(record.bytes);
  const auto* publish = message ? std::get_if<wire::Publish>(&*message) : nullptr;
  const auto* evict = message ? std::get_if<wire::Evict>(&*message) : nullptr;
  if (publish == nullptr && evict == nullptr) {
    ++num_malformed_;
    return;
  }
  const bool voids_before = publish != nullptr && publish->begins_snapshot;
  if (record.sequence > node.expected && !voids_before) return;  // a gap: ignore the rest
  node.expected = record.sequence + 1;
  ++num_applied_;
  if (evict != nullptr) {
    directory_.evict(node.id, node.applied++, evict->keys.keys, now);
    return;
  }
  Result<std::vector<ChunkEntry>> chunks = wire::chunks_of(*publish);
  if (!chunks) chunks = std::vector<ChunkEntry>{};
  const Tier tier = wire::tier_of(publish->tier).value_or(Tier::kHost);
  directory_.publish(node.id, node.applied++, wire::mark_of(*publish), *chunks, now, tier);
  directory_.want_snapshot(node.id);
}

void LogReader::claimed(NodeId node) {
  std::erase_if(nodes_, [&](const auto& entry) { return entry.second.id == node; });
}

}  // namespace kvferry::controller::scale
