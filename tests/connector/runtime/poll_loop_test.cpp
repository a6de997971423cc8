#include "connector/runtime/poll_loop.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

namespace kvferry {
namespace {

using namespace std::chrono_literals;

class PollLoopTest : public ::testing::Test {
 protected:
  void start() {
    loop_.start(
        [this](std::vector<pollfd>&) {
          ++num_turns_;
          return 1;
        },
        [this] {
          ++num_looks_;
          return is_due_.load();
        });
  }
  /// Returns whether `count` reaches `least` within a time that is much longer than that takes.
  static bool reaches(const std::atomic<int>& count, int least) {
    for (const auto end = std::chrono::steady_clock::now() + 20s; count < least;) {
      if (std::chrono::steady_clock::now() > end) return false;
      std::this_thread::sleep_for(1ms);
    }
    return true;
  }

  std::atomic<int> num_turns_ = 0, num_looks_ = 0;
  std::atomic<bool> is_due_ = false;
  PollLoop loop_;
};

TEST_F(PollLoopTest, WaitsOnWhileNoTurnIsDue) {
  start();
  EXPECT_TRUE(reaches(num_looks_, 3));
  EXPECT_EQ(num_turns_, 1);
  is_due_ = true;
  EXPECT_TRUE(reaches(num_turns_, 3));
}

TEST_F(PollLoopTest, WakesAndStopsWhileNoTurnIsDue) {
  start();
  EXPECT_TRUE(reaches(num_looks_, 1));
  loop_.wake();
  EXPECT_TRUE(reaches(num_turns_, 2));
  loop_.stop();
  EXPECT_EQ(num_turns_, 2);
}

}  // namespace
}  // namespace kvferry
