// The queues between the threads of the HTTP listener: of requests that wait for an answer, and of calls into the
// thread that owns the directory.
#pragma once

#include <fmt/format.h>

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "transport/base/clock.h"
#include "transport/base/net/event_fd.h"
#include "transport/base/result.h"

namespace kvferry::controller {

/// Items of several peers. pop() takes the oldest item of each peer in turn, so the items of a peer delay each other
/// peer by one item. Threads: one at a time.
template <class Item>
class FairQueue {
 public:
  bool empty() const { return turns_.empty(); }

  void push(const std::string& peer, Item item) {
    std::deque<Item>& items = items_[peer];
    if (items.empty()) turns_.push_back(peer);
    items.push_back(std::move(item));
  }

  /// The queue must not be empty.
  Item pop() {
    const auto next = items_.find(turns_.front());
    turns_.pop_front();
    Item item = std::move(next->second.front());
    next->second.pop_front();
    if (next->second.empty())
      items_.erase(next);
    else
      turns_.push_back(next->first);
    return item;
  }

 private:
  std::map<std::string, std::deque<Item>> items_;  // [peer] its items, at least one
  std::deque<std::string> turns_;                  // the peers of items_, in the order of their next turns
};

/// Lets other threads run work on the owner thread and wait for it.
class OwnerCalls {
 public:
  static constexpr std::size_t kCallsMax = 256;  // limit on waiting calls; further calls fail at once
  // Limits on one take(). The last call may exceed the time.
  static constexpr std::size_t kCallsPerTakeMax = 32;
  static constexpr TimeNs kTakeTimeMax = 20 * kMillisecond;

  /// `clock` must outlive this object.
  explicit OwnerCalls(const Clock& clock) : clock_(clock) {}

  /// Returns a file descriptor that becomes readable when a call arrives, and stays so until the next take().
  int fd() const { return wake_up_.fd(); }

  /// Runs `work` on the owner thread and waits until it is done. Threads: any but the owner thread. kUnavailable:
  /// `work` did not start and will not start any more, because `timeout` has passed, kCallsMax calls wait, or close()
  /// was called.
  Result<void> call(const std::function<void(TimeNs)>& work, TimeNs timeout) {
    const auto call = std::make_shared<Call>();
    call->work = &work;
    std::unique_lock lock(mutex_);
    if (!is_closed_ && calls_.size() < kCallsMax) {
      calls_.push_back(call);
      wake_up_.set();
      done_.wait_for(lock, std::chrono::nanoseconds(timeout),
                     [&] { return call->state == State::kDone || is_closed_; });
      // This thread must wait until a started call has finished, because `work` refers to this thread's stack.
      if (call->state == State::kRunning) done_.wait(lock, [&] { return call->state == State::kDone; });
      if (call->state == State::kDone) return {};
      call->state = State::kGivenUp;
      if (!is_closed_)
        return Error{
            ErrorCode::kUnavailable,
            fmt::format("the controller is busy and did not answer within {} ms; try again", timeout / kMillisecond)};
    }
    if (is_closed_)
      return Error{ErrorCode::kUnavailable,
                   "the controller is shutting down; try again once it runs, or ask another replica"};
    return Error{
        ErrorCode::kUnavailable,
        fmt::format("the controller is busy: {} requests wait for it, which is the limit; try again", kCallsMax)};
  }

  /// Runs waiting calls until kCallsPerTakeMax calls have run or kTakeTimeMax has passed. Threads: the owner thread.
  /// Returns true if more calls may wait.
  bool take(TimeNs now) {
    wake_up_.clear();
    const TimeNs ends_at = clock_.now() + kTakeTimeMax;
    for (std::size_t i = 0; i < kCallsPerTakeMax; ++i) {
      std::shared_ptr<Call> call;
      {
        const std::lock_guard lock(mutex_);
        if (calls_.empty()) return false;
        call = std::move(calls_.front());
        calls_.pop_front();
        if (call->state == State::kGivenUp) continue;
        call->state = State::kRunning;
      }
      (*call->work)(now);
      {
        const std::lock_guard lock(mutex_);
        call->state = State::kDone;
        done_.notify_all();
      }
      if (clock_.now() >= ends_at) break;
    }
    return true;
  }

  /// Fails all waiting and later calls.
  void close() {
    const std::lock_guard lock(mutex_);
    is_closed_ = true;
    done_.notify_all();
  }

 private:
  enum class State { kWaiting, kRunning, kDone, kGivenUp };
  struct Call {
    const std::function<void(TimeNs)>* work = nullptr;
    State state = State::kWaiting;
  };
  const Clock& clock_;
  EventFd wake_up_{std::nothrow};
  std::mutex mutex_;
  std::condition_variable done_;
  std::deque<std::shared_ptr<Call>> calls_;
  bool is_closed_ = false;
};

}  // namespace kvferry::controller
