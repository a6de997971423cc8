// Which words of nodes go into the event log, and when. Pure.
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
  std::string writer{};                       // name and run of this replica
  std::int64_t remember_ms = 15'000;          // three leases of a replica: until the next one knows it must write
  std::size_t remember_bytes_max = 8U << 20;  // of what is remembered
  std::size_t entry_bytes_max = 64U << 10;    // from here on a new entry begins
  std::size_t checkpoint_bytes = 32U << 20;   // after so much all Hellos are written again: the log is trimmed
};

/// One replica writes at a time. The others remember what was said of late, so that the one that takes over can say it:
/// what is written twice does no harm, what is missing is a hole. Where the log can't take what comes, the next thing
/// in it is the word that there is a hole, and all nodes' Hellos.
/// Threads: one at a time. `now` must never go back.
class LogWriter {
 public:
  /// False: there is no room; it is not taken.
  using Append = std::function<bool(std::string entry)>;

  LogWriter(LogWriterOptions options, Append append) : options_(std::move(options)), append_(std::move(append)) {}

  void set_writing(bool is_writing);
  bool is_writing() const { return is_writing_; }

  void joined(NodeId node, const NodeInfo& info, std::uint64_t next_sequence, TimeNs now);
  /// `applied_below`: the directory has made use of all lower numbers.
  void told(NodeId node, std::uint64_t sequence, std::uint64_t applied_below, std::string_view message, TimeNs now);
  void gone(NodeId node, TimeNs now);

  /// Appends what waits. `has_room`: the log would take a good deal more; to be called at the end of each turn.
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

  void add(Remembered said);
  void write(LogRecord record);
  void write_hello(const Known& known);
  void write_all_hellos();
  void settle(const Remembered& said);
  void finish_entry();

  LogWriterOptions options_;
  Append append_;
  bool is_writing_ = false;
  bool is_broken_ = false;                      // a hole has to be told
  std::unordered_map<NodeId, Known> nodes_;     // as they were before what is remembered
  std::unordered_map<NodeId, NodeInfo> infos_;  // of all that are there now
  std::deque<Remembered> remembered_;
  std::size_t remembered_bytes_ = 0;
  LogEntry entry_;
  std::size_t entry_bytes_ = 0;
  std::size_t since_checkpoint_ = 0;
  std::uint64_t num_holes_ = 0;
};

}  // namespace kvferry::controller::scale
