// A late replica learns from the event log what nodes told before it was there. Pure.
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

/// Nodes it brings are unconfirmed, expire as others do, and owe a snapshot: it is asked for when they say Hello here
/// themselves. From then on the log has no say in them. A number that is missing, or a hole, makes a node's later words
/// in the log worth nothing, or the node unknown; nothing waits for it.
/// Threads: the directory's owner. `now` must never go back.
class LogReader {
 public:
  /// `may_join`: false for an incarnation that is known to be out of date.
  LogReader(Directory& directory, std::function<bool(const NodeInfo&)> may_join)
      : directory_(directory), may_join_(std::move(may_join)) {}

  /// Of one entry, in order of the log. Malformed ones are counted.
  void apply(std::string_view entry, TimeNs now);
  /// It said Hello here.
  void claimed(NodeId node);
  /// It is forgotten here.
  void gone(NodeId node) { claimed(node); }

  /// Nodes that are known by the log alone.
  std::size_t num_nodes() const { return nodes_.size(); }
  std::uint64_t num_malformed() const { return num_malformed_; }
  std::uint64_t num_applied() const { return num_applied_; }

 private:
  struct Node {
    NodeId id;
    std::uint64_t incarnation = 0;
    std::string writer;
    std::uint64_t expected = 0;  // number of the writer's next word of it
    std::uint64_t applied = 0;   // number that the directory knows it by
  };

  void apply(const std::string& writer, const LogRecord& record, TimeNs now);
  void hello(const std::string& writer, const LogRecord& record, TimeNs now);
  void told(Node& node, const LogRecord& record, TimeNs now);

  Directory& directory_;
  std::function<bool(const NodeInfo&)> may_join_;
  std::map<NodeName, Node> nodes_;
  std::uint64_t num_malformed_ = 0;
  std::uint64_t num_applied_ = 0;
};

}  // namespace kvferry::controller::scale
