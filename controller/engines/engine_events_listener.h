// Sockets to engines that publish KV events: one subscription each, and a replay connection on demand.
#pragma once

#include <memory>
#include <string>

#include "controller/api/listener.h"
#include "controller/engines/engine_directory.h"

namespace kvferry::controller {

/// Threads: all functions, including add() and remove(), are called on the owner thread, as for any Listener.
class EngineEventsListener : public Listener {
 public:
  /// `directory` must outlive the listener. Only the listener may add engines to `directory` and remove them from it.
  static std::unique_ptr<EngineEventsListener> make(EngineDirectory& directory);

  /// Subscribes to an engine, which need not run yet. Keeps the subscription if an identical engine is registered.
  /// kInvalidArgument: an endpoint is malformed; kFull: 1024 engines are registered; kUnavailable: a socket can't be
  /// made or connected.
  virtual Result<EngineDirectory::Added> add(const EngineInfo& info, TimeNs now) = 0;
  virtual void remove(EngineNumber engine) = 0;

  /// Returns the number of messages that were dropped because they had a wrong number of parts or no valid sequence
  /// number.
  virtual std::uint64_t num_malformed() const = 0;
};

}  // namespace kvferry::controller
