// The event log: its format, the writer of nodes' messages into it, and its replay into the directory of a replica
// that started late. An entry has records; a record is one message or event of one node, or marks a hole. Pure.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "controller/directory/directory.h"
#include "controller/scale/replicated_state.h"
#include "transport/base/clock.h"
#include "transport/base/wire.h"

namespace kvferry::controller::scale {

enum class LogKind : std::uint32_t {
  kHello = 1,   // `bytes`: wire::Hello, whose next_sequence is the number of the node's next message
  kUpdate = 2,  // `bytes`: wire::Publish or wire::Evict
  kGone = 3,    // the node left, expired or was fenced
  kHole = 4,    // records before this one are missing; the record belongs to no node
};

struct LogRecord {
  std::uint32_t kind = 0;
  std::string name_space{}, engine_id{};
  std::uint64_t incarnation = 0;
  std::uint64_t sequence = 0;  // in kUpdate: number of the message; in kHello: number of the node's next message
  std::string bytes{};
  KVFERRY_FIELDS(kind, name_space, engine_id, incarnation, sequence, bytes);
};

/// A node numbers its messages to each replica separately, so a sequence number belongs to the writer of the entry.
struct LogEntry {
  std::uint32_t version = 1;
  std::string writer{};  // name and run number of the replica that wrote the entry
  std::vector<LogRecord> records{};
  KVFERRY_FIELDS(version, writer, records);
};

struct LogWriterOptions {
  std::string writer{};  // name and run number of this replica
  /// Records older than this are dropped. The default is three times lease_s (replicated_state.h): a new writer takes
  /// over when the former writer's lease has expired, and then still has the records that the former one did not write.
  std::int64_t remember_ms = 15'000;
  std::size_t remember_bytes_max = 8U << 20;  // limit on the size of all remembered records
  std::size_t entry_bytes_max = 64U << 10;    // limit on an entry's size, which only a single large record exceeds
  std::size_t checkpoint_bytes =
      32U << 20;  // after this many bytes all Hellos are written again, because trimming removes older ones
};

/// Writes the event log. With etcd, the replicas agree on one writer. The other replicas remember recent records, so
/// that the next writer can append them: readers tolerate duplicates, but not missing records. If the log cannot take
/// an entry, a kHole record and the Hellos of all nodes follow as soon as the log has room. Threads: one at a time.
/// `now` must not decrease.
class LogWriter {
 public:
  /// Appends an entry to the log. Returns false if there is no room for it.
  using Append = std::function<bool(std::string entry)>;

  LogWriter(LogWriterOptions options, Append append) : options_(std::move(options)), append_(std::move(append)) {}

  void set_writing(bool is_writing);
  bool is_writing() const { return is_writing_; }

  void joined(NodeId node, const NodeInfo& info, std::uint64_t next_sequence, TimeNs now);
  /// Records a Publish or Evict. `applied_below`: the directory has applied all lower sequence numbers.
  void updated(NodeId node, std::uint64_t sequence, std::uint64_t applied_below, std::string_view message, TimeNs now);
  void gone(NodeId node, TimeNs now);

  /// Appends the pending records. The caller must call flush() at the end of each turn of its loop. `has_room`: the
  /// log's buffer is far from full.
  void flush(TimeNs now, bool has_room);

  std::uint64_t num_holes() const { return num_holes_; }
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
  void write_all_hellos();
  void settle(const Remembered& record);
  void finish_entry();

  LogWriterOptions options_;
  Append append_;
  bool is_writing_ = false;
  bool is_broken_ = false;                      // entries were lost, and the kHole record is not written yet
  std::unordered_map<NodeId, Known> nodes_;     // nodes as they were before the oldest remembered record
  std::unordered_map<NodeId, NodeInfo> infos_;  // nodes that were passed to joined() and not to gone() since
  std::deque<Remembered> remembered_;
  std::size_t remembered_bytes_ = 0;
  LogEntry entry_;
  std::size_t entry_bytes_ = 0;
  std::size_t since_checkpoint_ = 0;
  std::uint64_t num_holes_ = 0;
};

/// Applies the log to a directory. A node that is known only from the log expires like any other node. A node that
/// sends Hello to this replica reports to it directly from then on: the directory requests a snapshot from the node,
/// and the log's records of the node are ignored. After a gap in a node's sequence numbers, its kUpdate records are
/// ignored until its next Hello or snapshot in the log. A kHole record removes all nodes that are known only from the
/// log, because they may have changed in the missing records. Threads: only the thread that owns the directory may call
/// the methods. `now` must not decrease.
class LogReader {
 public:
  /// `may_join` returns false for an outdated incarnation.
  LogReader(Directory& directory, std::function<bool(const NodeInfo&)> may_join)
      : directory_(directory), may_join_(std::move(may_join)) {}

  /// Applies one entry. The caller must pass the entries in the order of the log. Counts malformed entries and records.
  void apply(std::string_view entry, TimeNs now);
  /// Stops applying the log to a node, which sent Hello to this replica or was removed from the directory.
  void remove(NodeId node);

  /// Returns the number of nodes that are known from the log only.
  std::size_t num_nodes() const { return nodes_.size(); }
  std::uint64_t num_malformed() const { return num_malformed_; }

 private:
  struct Node {
    NodeId id;
    std::uint64_t incarnation = 0;
    std::string writer;
    std::uint64_t expected = 0;  // sequence number of the writer's next record for this node
    std::uint64_t applied = 0;   // next sequence number that the reader uses for this node in the directory
  };

  void apply(const std::string& writer, const LogRecord& record, TimeNs now);
  void hello(const std::string& writer, const LogRecord& record, TimeNs now);
  void update(Node& node, const LogRecord& record, TimeNs now);

  Directory& directory_;
  std::function<bool(const NodeInfo&)> may_join_;
  std::map<NodeName, Node> nodes_;
  std::uint64_t num_malformed_ = 0;
};

}  // namespace kvferry::controller::scale
