#include "controller/http/http_queues.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

namespace kvferry::controller {
namespace {

/// A clock that only the works of calls move.
class WorkClock final : public Clock {
 public:
  TimeNs now() const override { return time_; }
  void pass(TimeNs time) { time_ += time; }

 private:
  std::atomic<TimeNs> time_{kSecond};
};

/// Calls from threads that wait for them.
class WaitingCalls {
 public:
  WaitingCalls(OwnerCalls& calls, std::size_t count, const std::function<void(TimeNs)>& work) : calls_(calls) {
    for (std::size_t i = 0; i < count; ++i)
      threads_.emplace_back([this, work] {
        ++num_begun_;
        if (calls_.call(work, 60 * kSecond)) ++num_done_;
      });
    while (num_begun_ < count) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(50));  // so that nearly all of them wait
  }
  ~WaitingCalls() {
    calls_.close();
    for (std::thread& thread : threads_) thread.join();
  }

 private:
  OwnerCalls& calls_;
  std::atomic<std::size_t> num_begun_{0}, num_done_{0};
  std::vector<std::thread> threads_;
};

TEST(OwnerCalls, CallsThatTakeLongLeaveTheRestToTheNextTurn) {
  WorkClock clock;
  OwnerCalls calls(clock);
  std::size_t num_run = 0;
  const WaitingCalls waiting(calls, 16, [&](TimeNs) {
    ++num_run;
    clock.pass(OwnerCalls::kTakeTimeMax / 4);
  });
  for (std::size_t before = 0; num_run < 16; before = num_run) {
    calls.take(kSecond);
    ASSERT_LE(num_run - before, 4U);
  }
}

TEST(OwnerCalls, ACallThatTakesTooLongRunsAlone) {
  WorkClock clock;
  OwnerCalls calls(clock);
  std::size_t num_run = 0;
  const WaitingCalls waiting(calls, 3, [&](TimeNs) {
    ++num_run;
    clock.pass(kSecond);
  });
  while (num_run == 0) calls.take(kSecond);
  EXPECT_EQ(num_run, 1U);
}

TEST(FairQueue, ServesPeersInRotation) {
  FairQueue<int> queue;
  EXPECT_TRUE(queue.empty());
  for (int i = 0; i < 100; ++i) queue.push("busy", i);
  EXPECT_EQ(queue.pop(), 0);
  queue.push("a", 1000);
  queue.push("b", 2000);
  queue.push("a", 1001);
  for (const int expected : {1, 1000, 2000, 2, 1001, 3, 4}) EXPECT_EQ(queue.pop(), expected);
  queue.push("b", 2001);
  EXPECT_EQ(queue.pop(), 5);
  EXPECT_EQ(queue.pop(), 2001);
  for (int i = 6; i < 100; ++i) EXPECT_EQ(queue.pop(), i);
  EXPECT_TRUE(queue.empty());
}

}  // namespace
}  // namespace kvferry::controller
