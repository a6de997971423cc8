// Observer of the nodes' messages, which joins replicas together. It may also refuse registrations.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "controller/api/status.h"
#include "controller/directory/directory.h"

namespace kvferry::controller {

namespace wire {
struct AdminRequest;
}  // namespace wire

/// Threads: the directory's owner. No call blocks or throws.
class SessionObserver {
 public:
  virtual ~SessionObserver() = default;

  /// Returns why the node may not register, as a sentence, or nullopt if it may.
  virtual std::optional<std::string> refusal(const NodeInfo& info) const = 0;
  /// A node registered, perhaps again.
  virtual void joined(NodeId node, const NodeInfo& info, std::uint64_t next_sequence, TimeNs now) = 0;
  /// A Publish or Evict of `node` arrived, also if the directory dropped it.
  virtual void received(NodeId node, std::uint64_t sequence, std::string_view message, TimeNs now) = 0;
  /// A node left, expired or was fenced; also one that never registered here itself.
  virtual void gone(NodeId node, TimeNs now) = 0;

  /// An admin command of a client of this replica succeeded.
  virtual void executed(const wire::AdminRequest& request, TimeNs now) = 0;

  /// Endpoints of the live replicas, this one included; `version` increases from 1 with each change.
  virtual const std::vector<std::string>& replicas() const = 0;
  virtual std::uint64_t replicas_version() const = 0;
  virtual ScaleStatus status(TimeNs now) const = 0;
};

}  // namespace kvferry::controller
