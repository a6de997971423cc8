// Decides which messages of nodes go into the event log, and when. Pure.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>

#include "controller/directory/directory.h"
#include "controller/scale/log_format.h"
#include "transport/base/clock.h"

namespace kvferry::controller::scale {

struct LogWriterOptions {
  std::string writer{};  // name and run of this replica
  std::int64_t remember_ms =
      15'000;  // age limit of remembered records: three leases of a replica, until a new writer takes over
  std::size_t remember_bytes_max = 8U << 20;  // limit on remembered records
  std::size_t entry_bytes_max = 64U << 10;    // a larger entry is split
  std::size_t checkpoint_bytes =
      32U << 20;  // all Hellos are repeated after this many bytes, because the log is trimmed
};

/// One replica writes at a time. The others remember recent records, so that the next writer can append them: readers
/// tolerate duplicates, but not missing records. If the log cannot take an entry, a kHole record and the Hellos of all
/// nodes follow as soon as it has room.
/// Threads: one at a time. `now` must not decrease.
class LogWriter {
 public:
  /// Returns false if there is no room for the entry.
  using Append = std::function<bool(std::string entry)>;

  LogWriter(LogWriterOptions options, Append append) : options_(std::move(options)), append_(std::move(append)) {}

  void set_writing(bool is_writing);
  bool is_writing() const { return is_writing_; }

  void joined(NodeId node, const NodeInfo& info, std::uint64_t next_sequence, TimeNs now);
  /// Records a Publish or Evict. `applied_below`: the directory has applied all lower sequence numbers.
  void updated(NodeId node, std::uint64_t sequence, std::uint64_t applied_below, std::string_view message, TimeNs now);
  void gone(NodeId node, TimeNs now);

  /// Appends the pending records; call at the end of each turn. `has_room`: the log's buffer is far from full.
  void flush(TimeNs now, bool has_room);

  std::uint64_t num_holes() const { return num_holes_; }
  std::size_t num_nodes() const { return nodes_.size(); }
  std::size_t remembered_bytes() const { return remembered_bytes_; }

 private:
  struct Known {
    NodeInfo info;
    std::uint64_t next_sequence = 0;
  };
  struct Remembered {
    TimeNs at = 0;
    NodeId node;
    LogRecord record;
    std::uint64_t applied_below = 0;
  };

  void add(Remembered record);
  void write(LogRecord record);
  void write_hello(const Known& known);
  void write_all_hellos();
  void settle(const Remembered& record);
  void finish_entry();

  LogWriterOptions options_;
  Append append_;
  bool is_writing_ = false;
  bool is_broken_ = false;                      // a kHole record is pending
  std::unordered_map<NodeId, Known> nodes_;     // state before the remembered records
  std::unordered_map<NodeId, NodeInfo> infos_;  // all current nodes
  std::deque<Remembered> remembered_;
  std::size_t remembered_bytes_ = 0;
  LogEntry entry_;
  std::size_t entry_bytes_ = 0;
  std::size_t since_checkpoint_ = 0;
  std::uint64_t num_holes_ = 0;
};

}  // namespace kvferry::controller::scale
