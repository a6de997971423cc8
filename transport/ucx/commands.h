// What other threads ask of the progress thread, and the bounded way there. Private to this folder.
#pragma once

#include <atomic>
#include <cstdint>
#include <future>
#include <mutex>
#include <utility>
#include <variant>
#include <vector>

#include "transport/event_fd.h"
#include "transport/transfer_table.h"
#include "transport/ucx/messages.h"

namespace kvferry::ucx {

struct SubmitCommand {
  AcceptedTransfer transfer;
};
struct FeedCommand {
  TransferId id;
  FedCopies fed;
};
struct CancelCommand {
  TransferId id;
};
struct AddPeerCommand {
  PeerId peer;
  Address address;
};
struct DropPeerCommand {
  PeerId peer;
};
struct MapMemoryCommand {
  RegionId region;
  void* base;
  std::uint64_t bytes;
  Device* device;                          // nullptr: host memory
  std::promise<Result<std::string>> rkey;  // packed
};
struct UnmapMemoryCommand {
  RegionId region;
  std::promise<void> unmapped;
};
struct StopCommand {};

using Command = std::variant<SubmitCommand, FeedCommand, CancelCommand, AddPeerCommand, DropPeerCommand,
                             MapMemoryCommand, UnmapMemoryCommand, StopCommand>;

/// Threads: post() any, the rest the progress thread. Bounded by its users: the transfer_table limits transfers and allows one
/// cancellation each, and whoever maps memory waits for the answer.
class Inbox {
 public:
  void post(Command command) {
    {
      const std::lock_guard lock(mutex_);
      commands_.push_back(std::move(command));
      has_commands_.store(true, std::memory_order_release);
    }
    wake_.set();
  }
  std::vector<Command> take() {
    if (!has_commands_.load(std::memory_order_acquire)) return {};
    const std::lock_guard lock(mutex_);
    has_commands_.store(false, std::memory_order_relaxed);
    return std::exchange(commands_, {});
  }
  bool has_commands() const { return has_commands_.load(std::memory_order_acquire); }
  /// Readable after a post() until cleared; clear before has_commands() is asked, so that no post is slept through.
  EventFd& wake() { return wake_; }

 private:
  std::mutex mutex_;
  std::vector<Command> commands_;
  std::atomic<bool> has_commands_{false};
  EventFd wake_;
};

}  // namespace kvferry::ucx
