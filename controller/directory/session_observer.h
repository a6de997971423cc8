// Who hears what nodes say to this controller, and has a word in who may join: what joins replicas together.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "controller/directory/directory.h"
#include "controller/api/status.h"

namespace kvferry::controller {

namespace wire {
struct AdminRequest;
}  // namespace wire

/// Threads: the directory's owner. No call blocks or throws.
class SessionObserver {
 public:
  virtual ~SessionObserver() = default;

  /// Why it may not join, as a sentence; nullopt: it may.
  virtual std::optional<std::string> refusal(const NodeInfo& info) const = 0;
  /// It said Hello, perhaps again.
  virtual void joined(NodeId node, const NodeInfo& info, std::uint64_t next_sequence, TimeNs now) = 0;
  /// A Publish or Evict of it, as it came, whatever the directory made of it.
  virtual void told(NodeId node, std::uint64_t sequence, std::string_view message, TimeNs now) = 0;
  /// It left, expired or was fenced; also one that never said Hello here.
  virtual void gone(NodeId node, TimeNs now) = 0;

  /// It was asked for here, and holds.
  virtual void ruled(const wire::AdminRequest& request, TimeNs now) = 0;

  /// Where the living replicas are reached, this one too; `version` grows with each change, from 1.
  virtual const std::vector<std::string>& replicas() const = 0;
  virtual std::uint64_t replicas_version() const = 0;
  virtual ScaleStatus status(TimeNs now) const = 0;
};

}  // namespace kvferry::controller
