// Sockets to engines that publish KV events: one subscription each, and a replay connection on demand.
#pragma once

#include <memory>
#include <string>

#include "controller/api/listener.h"
#include "controller/engines/engine_directory.h"

namespace kvferry::controller {

/// Threads: those of Listener, also for add() and remove().
class EngineEventsListener : public Listener {
 public:
  /// `directory` must outlive the listener. Only the listener may add or remove its engines.
  static std::unique_ptr<EngineEventsListener> make(EngineDirectory& directory);

  /// Subscribes to an engine, which need not run yet. Keeps the subscription if an identical engine is registered.
  /// kInvalidArgument: not an endpoint; kFull: too many engines; kUnavailable: no file descriptors left.
  virtual Result<EngineDirectory::Added> add(const EngineInfo& info, TimeNs now) = 0;
  virtual void remove(EngineNumber engine) = 0;

  /// Number of messages that are not batches: fewer than two parts, or without a sequence number.
  virtual std::uint64_t num_malformed() const = 0;
};

}  // namespace kvferry::controller
