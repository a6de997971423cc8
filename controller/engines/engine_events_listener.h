// The sockets to engines that publish their own KV events: a subscription each, and a replay on demand.
#pragma once

#include <memory>
#include <string>

#include "controller/engines/engine_directory.h"
#include "controller/api/listener.h"

namespace kvferry::controller {

/// Threads: as Listener; add() and remove() too.
class EngineEventsListener : public Listener {
 public:
  /// `directory` must outlive the front, which alone adds and removes its engines.
  static std::unique_ptr<EngineEventsListener> make(EngineDirectory& directory);

  /// Follows an engine from now on; it need not run yet. One that is known to the letter goes on as it is.
  /// kInvalidArgument: not an endpoint; kFull: too many engines; kUnavailable: no file descriptors left.
  virtual Result<EngineDirectory::Added> add(const EngineInfo& info, TimeNs now) = 0;
  virtual void remove(EngineNumber engine) = 0;

  /// Messages that were no batches: fewer frames than two, or no sequence number.
  virtual std::uint64_t num_malformed() const = 0;
};

}  // namespace kvferry::controller
