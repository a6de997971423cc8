// Lets other threads run work on the owner thread and wait for it.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>

#include "transport/base/clock.h"
#include "transport/base/net/event_fd.h"
#include "transport/base/result.h"

namespace kvferry::controller {

class OwnerCalls {
 public:
  /// Readable while calls wait.
  int fd() const { return wake_up_.fd(); }

  /// Threads: any but the owner thread. kUnavailable: `work` did not start within `timeout`, and never will.
  Result<void> call(const std::function<void(TimeNs)>& work, TimeNs timeout) {
    const auto call = std::make_shared<Call>();
    call->work = &work;
    std::unique_lock lock(mutex_);
    if (!is_closed_ && calls_.size() < kCallsMax) {
      calls_.push_back(call);
      wake_up_.set();
      done_.wait_for(lock, std::chrono::nanoseconds(timeout),
                     [&] { return call->state == State::kDone || is_closed_; });
      // A started call must finish: `work` refers to this thread's stack.
      if (call->state == State::kRunning) done_.wait(lock, [&] { return call->state == State::kDone; });
      if (call->state == State::kDone) return {};
      call->state = State::kGivenUp;
    }
    return Error{ErrorCode::kUnavailable, "the controller is busy and did not answer in time; try again"};
  }

  /// Threads: the owner thread. Returns true if more calls wait.
  bool take(TimeNs now) {
    wake_up_.clear();
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
      const std::lock_guard lock(mutex_);
      call->state = State::kDone;
      done_.notify_all();
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
  static constexpr std::size_t kCallsMax = 256;  // limit on waiting calls
  static constexpr std::size_t kCallsPerTakeMax = 32;
  enum class State { kWaiting, kRunning, kDone, kGivenUp };
  struct Call {
    const std::function<void(TimeNs)>* work = nullptr;
    State state = State::kWaiting;
  };
  EventFd wake_up_{std::nothrow};
  std::mutex mutex_;
  std::condition_variable done_;
  std::deque<std::shared_ptr<Call>> calls_;
  bool is_closed_ = false;
};

}  // namespace kvferry::controller
