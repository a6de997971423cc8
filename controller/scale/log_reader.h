// Replays the event log into the directory of a replica that started late. Pure.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>

#include "controller/directory/directory.h"
#include "controller/scale/log_format.h"
#include "controller/scale/replicated_state.h"
#include "transport/base/clock.h"

namespace kvferry::controller::scale {

/// Nodes from the log are unconfirmed and expire as usual. When such a node sends Hello to this replica, the directory
/// requests a snapshot from it, and the log no longer applies to it.
/// After a gap in a node's sequence numbers, the node's later log entries are ignored; a kHole record removes all
/// nodes. Threads: the directory's owner. `now` must not decrease.
class LogReader {
 public:
  /// `may_join` returns false for an outdated incarnation.
  LogReader(Directory& directory, std::function<bool(const NodeInfo&)> may_join)
      : directory_(directory), may_join_(std::move(may_join)) {}

  /// Applies one entry; call in log order. Counts malformed entries.
  void apply(std::string_view entry, TimeNs now);
  /// The node sent Hello to this replica.
  void claimed(NodeId node);
  /// The node was removed from the directory.
  void gone(NodeId node) { claimed(node); }

  /// Number of nodes that are known from the log only.
  std::size_t num_nodes() const { return nodes_.size(); }
  std::uint64_t num_malformed() const { return num_malformed_; }
  std::uint64_t num_applied() const { return num_applied_; }

 private:
  struct Node {
    NodeId id;
    std::uint64_t incarnation = 0;
    std::string writer;
    std::uint64_t expected = 0;  // next sequence number by the writer's count
    std::uint64_t applied = 0;   // next sequence number in the directory
  };

  void apply(const std::string& writer, const LogRecord& record, TimeNs now);
  void hello(const std::string& writer, const LogRecord& record, TimeNs now);
  void update(Node& node, const LogRecord& record, TimeNs now);

  Directory& directory_;
  std::function<bool(const NodeInfo&)> may_join_;
  std::map<NodeName, Node> nodes_;
  std::uint64_t num_malformed_ = 0;
  std::uint64_t num_applied_ = 0;
};

}  // namespace kvferry::controller::scale
