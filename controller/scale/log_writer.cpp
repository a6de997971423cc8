#include "controller/scale/log_writer.h"

#include "controller/protocol/wire.h"

namespace kvferry::controller::scale {
namespace {

constexpr std::size_t kRecordBytes = 64;  // approximate size of a record without its texts

LogRecord record_of(LogKind kind, const NodeInfo& info) {
  return {.kind = static_cast<std::uint32_t>(kind),
          .name_space = info.name_space,
          .engine_id = info.engine_id.value,
          .incarnation = info.incarnation.value};
}

std::size_t size_of(const LogRecord& record) {
  return kRecordBytes + record.name_space.size() + record.engine_id.size() + record.bytes.size();
}

std::string hello_of(const NodeInfo& info, std::uint64_t next_sequence) {
  return encode(wire::Hello{.node = info, .next_sequence = next_sequence});
}

}  // namespace

void LogWriter::joined(NodeId node, const NodeInfo& info, std::uint64_t next_sequence, TimeNs now) {
  infos_[node] = info;
  LogRecord record = record_of(LogKind::kHello, info);
  record.sequence = next_sequence;
  record.bytes = hello_of(info, next_sequence);
  add({now, node, std::move(record), next_sequence});
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

/// The record is written, or too old to be remembered: applies it to nodes_.
void LogWriter::settle(const Remembered& settled) {
  const auto known = nodes_.find(settled.node);
  switch (static_cast<LogKind>(settled.record.kind)) {
    case LogKind::kHello:
      // Without an info, the node is gone again and its kGone record follows.
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
  for (const auto& [node, known] : nodes_) write_hello(known);
}

void LogWriter::write_hello(const Known& known) {
  LogRecord record = record_of(LogKind::kHello, known.info);
  record.sequence = known.next_sequence;
  record.bytes = hello_of(known.info, known.next_sequence);
  write(std::move(record));
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

}  // namespace kvferry::controller::scale
