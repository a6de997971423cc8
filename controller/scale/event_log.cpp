#include "controller/scale/event_log.h"

#include <utility>

#include "controller/protocol/wire.h"

namespace kvferry::controller::scale {
namespace {

constexpr std::size_t kRecordBytes = 64;  // approximate size of a record without its strings
/// First sequence number that LogReader uses in the directory for a node from the log. It is higher than the node's own
/// numbers: so the directory takes the node's Hello for the start of new numbers, and requests a snapshot from the
/// node.
constexpr std::uint64_t kFirstSequence = std::uint64_t{1} << 62;

LogRecord record_of(LogKind kind, const NodeInfo& info) {
  return {.kind = static_cast<std::uint32_t>(kind),
          .name_space = info.name_space,
          .engine_id = info.engine_id.value,
          .incarnation = info.incarnation.value};
}

std::size_t size_of(const LogRecord& record) {
  return kRecordBytes + record.name_space.size() + record.engine_id.size() + record.bytes.size();
}

LogRecord hello_of(const NodeInfo& info, std::uint64_t next_sequence) {
  LogRecord record = record_of(LogKind::kHello, info);
  record.sequence = next_sequence;
  record.bytes = encode(wire::Hello{.node = info, .next_sequence = next_sequence});
  return record;
}

}  // namespace

void LogWriter::joined(NodeId node, const NodeInfo& info, std::uint64_t next_sequence, TimeNs now) {
  infos_[node] = info;
  add({now, node, hello_of(info, next_sequence), next_sequence});
}

void LogWriter::updated(NodeId node, std::uint64_t sequence, std::uint64_t applied_below, std::string_view message,
                        TimeNs now) {
  const auto info = infos_.find(node);
  if (info == infos_.end()) return;
  LogRecord record = record_of(LogKind::kUpdate, info->second);
  record.sequence = sequence;
  record.bytes = message;
  add({now, node, std::move(record), applied_below});
}

void LogWriter::gone(NodeId node, TimeNs now) {
  const auto info = infos_.find(node);
  if (info == infos_.end()) return;
  LogRecord record = record_of(LogKind::kGone, info->second);
  infos_.erase(info);
  add({now, node, std::move(record), 0});
}

void LogWriter::add(Remembered added) {
  if (is_writing_) {
    settle(added);
    return write(std::move(added.record));
  }
  remembered_bytes_ += size_of(added.record);
  remembered_.push_back(std::move(added));
}

/// Applies a record to nodes_, because the record is being written or is dropped from remembered_.
void LogWriter::settle(const Remembered& settled) {
  const auto known = nodes_.find(settled.node);
  switch (static_cast<LogKind>(settled.record.kind)) {
    case LogKind::kHello:
      // If infos_ lacks the node, the node has left since this Hello, and its kGone record follows.
      if (const auto info = infos_.find(settled.node); info != infos_.end())
        nodes_[settled.node] = {info->second, settled.applied_below};
      break;
    case LogKind::kUpdate:
      if (known != nodes_.end()) known->second.next_sequence = settled.applied_below;
      break;
    default:
      if (known != nodes_.end()) nodes_.erase(known);
  }
}

void LogWriter::set_writing(bool is_writing) {
  if (is_writing == is_writing_) return;
  is_writing_ = is_writing;
  if (!is_writing) return finish_entry();
  since_checkpoint_ = 0;
  write_all_hellos();
  while (!remembered_.empty()) {
    Remembered next = std::move(remembered_.front());
    remembered_.pop_front();
    settle(next);
    write(std::move(next.record));
  }
  remembered_bytes_ = 0;
}

void LogWriter::write_all_hellos() {
  for (const auto& [node, known] : nodes_) write(hello_of(known.info, known.next_sequence));
}

void LogWriter::write(LogRecord record) {
  if (is_broken_) return;
  const std::size_t size = size_of(record);
  if (!entry_.records.empty() && entry_bytes_ + size > options_.entry_bytes_max) finish_entry();
  entry_bytes_ += size;
  since_checkpoint_ += size;
  entry_.records.push_back(std::move(record));
}

void LogWriter::finish_entry() {
  if (entry_.records.empty()) return;
  entry_.writer = options_.writer;
  if (!is_broken_ && !append_(encode(entry_))) {
    is_broken_ = true;
    ++num_holes_;
  }
  entry_.records.clear();
  entry_bytes_ = 0;
}

void LogWriter::flush(TimeNs now, bool has_room) {
  while (!remembered_.empty() && (now - remembered_.front().at > options_.remember_ms * kMillisecond ||
                                  remembered_bytes_ > options_.remember_bytes_max)) {
    settle(remembered_.front());
    remembered_bytes_ -= size_of(remembered_.front().record);
    remembered_.pop_front();
  }
  if (!is_writing_) return;
  if (is_broken_ && has_room) {
    is_broken_ = false;
    since_checkpoint_ = 0;
    write({.kind = static_cast<std::uint32_t>(LogKind::kHole)});
    write_all_hellos();
  } else if (since_checkpoint_ >= options_.checkpoint_bytes) {
    since_checkpoint_ = 0;
    write_all_hellos();
  }
  finish_entry();
}

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
    // The nodes may have changed in the missing records, so they are removed until their next Hello, which may come
    // from the log or from the node.
    for (const auto& [name, node] : std::exchange(nodes_, {})) directory_.leave(node.id);
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
    return;  // the record is ignored: the node sent Hello to this replica, or was reloaded from the state folder
  if (known != nodes_.end() && known->second.incarnation == info.incarnation.value) {
    known->second.writer = writer;
    known->second.expected = hello->next_sequence;
    return;
  }
  if (!may_join_(info)) return;
  const Result<Joined> joined = directory_.join(info, kFirstSequence, now);
  if (!joined) return;  // refused, e.g. because a newer incarnation is registered or the directory is full
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
  if (record.sequence > node.expected && !voids_before) return;  // after a gap, only a new snapshot is applied
  node.expected = record.sequence + 1;
  if (evict != nullptr) {
    directory_.evict(node.id, node.applied++, evict->keys.keys, now);
    return;
  }
  Result<std::vector<ChunkEntry>> chunks = wire::chunks_of(*publish);
  if (!chunks) {
    ++num_malformed_;
    chunks = std::vector<ChunkEntry>{};  // the number counts as used, as in the directory of the log's writer
  }
  const Tier tier = wire::tier_of(publish->tier).value_or(Tier::kHost);
  directory_.publish(node.id, node.applied++, wire::mark_of(*publish), *chunks, now, tier);
  directory_.want_snapshot(node.id);
}

void LogReader::remove(NodeId node) {
  std::erase_if(nodes_, [&](const auto& entry) { return entry.second.id == node; });
}

}  // namespace kvferry::controller::scale
