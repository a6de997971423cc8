// The controller on the scheduler node's thread: carries the core's actions to the controller, and its answers and
// orders to the core. A part of NodeLinks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <utility>

#include "connector/core/scheduler/scheduler_core.h"
#include "controller/api/client.h"
#include "transport/base/clock.h"

namespace kvferry {

/// Threads: one owner.
class DirectoryLink {
 public:
  /// Calls the core under its lock and queues the actions that follow.
  using WithCore = std::function<void(const std::function<void(SchedulerCore&)>&)>;
  DirectoryLink(std::unique_ptr<controller::Client> directory, WithCore with_core, const Clock& clock)
      : directory_(std::move(directory)), with_core_(std::move(with_core)), clock_(clock) {}

  int fd() const { return directory_->fd(); }
  void set_load(std::size_t num_requests) { directory_->set_load(num_requests); }

  void execute(QueryDirectory& query);
  void execute(PublishChunks& published);
  void execute(AnnounceEvictions& evicted) { directory_->evict(evicted.keys); }

  void take_events();
  /// Deregisters from the controller. Idempotent; no other method may be called after it.
  void leave();

 private:
  void take(controller::LookupReply& reply);
  void take(controller::LookupFailed& failed);
  void take(controller::Registered& registered);
  void take(controller::Refused& refused);
  void take(controller::Lost& lost);
  void take(controller::SnapshotWanted& wanted);
  void take(controller::PinChunks& wanted);
  void take(controller::UnpinChunks& wanted);
  void take(controller::ReplicateChunks& wanted);
  void take(controller::EvictChunks& wanted);

  std::unique_ptr<controller::Client> directory_;
  WithCore with_core_;
  const Clock& clock_;
  std::map<std::uint64_t, std::uint64_t> fetch_of_lookup_;  // keyed by the controller's token
};

}  // namespace kvferry
