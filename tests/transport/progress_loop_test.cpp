#include "transport/progress_loop.h"

#include <gtest/gtest.h>
#include <sys/epoll.h>

#include <functional>
#include <future>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>

#include "transport/base/net/event_fd.h"

namespace kvferry {
namespace {

constexpr TimeNs kPatience = 30 * kSecond;
constexpr TimeNs kForeverSpin = 3600 * kSecond;
constexpr std::uint64_t kTag = 7;

/// Records what the loop calls. Only the loop's lock protects the members, so the thread sanitizer reports a loop that
/// runs on two threads at once.
class Recorder final : public ProgressLoop::Owner {
 public:
  void on_ready(std::uint64_t tag, std::uint32_t) override {
    if (tag != kTag) return;
    ++num_ready;
    ready_by = std::this_thread::get_id();
    event.clear();
    log += 'R';
  }
  bool advance(TimeNs now) override {
    ++num_advances;
    log += 'A';
    return on_advance && on_advance(now);
  }
  TimeNs next_deadline() const override { return deadline; }
  void set_spinning(bool spinning) override {
    is_spinning = spinning;
    log += spinning ? 'T' : 'F';
  }

  EventFd event;
  std::function<bool(TimeNs)> on_advance;
  TimeNs deadline = ProgressLoop::kNever;
  int num_ready = 0;
  int num_advances = 0;
  bool is_spinning = false;
  std::string log;  // R: ready; A: advance; T and F: set_spinning(true) and (false)
  std::thread::id ready_by;
};

void call_and_wait(ProgressLoop& loop, const std::function<void()>& task) {
  std::promise<void> done;
  loop.call([&] {
    task();
    done.set_value();
  });
  done.get_future().wait();
}

class ProgressLoopTest : public ::testing::Test {
 protected:
  /// Replaces the loop by one that spins for `spin_ns`.
  void start(TimeNs spin_ns) {
    loop_ = std::make_unique<ProgressLoop>(owner_, "test", spin_ns, 0);
    loop_->call([this] { EXPECT_TRUE(loop_->watch(owner_.event.fd(), EPOLLIN, kTag)); });
    loop_->start();
  }
  template <class T>
  T read(const T& field) {
    T value{};
    call_and_wait(*loop_, [&] { value = field; });
    return value;
  }
  template <class Condition>
  bool comes_true(Condition condition) {
    const SteadyClock clock;
    const TimeNs began_at = clock.now();
    while (!condition()) {
      if (clock.now() - began_at > kPatience) return false;
      std::this_thread::yield();
    }
    return true;
  }
  void TearDown() override {
    if (loop_ != nullptr) loop_->stop();
  }

  Recorder owner_;
  std::unique_ptr<ProgressLoop> loop_;
};

TEST_F(ProgressLoopTest, CallsOfManyThreadsRunOnceEachAndInTheOrderOfTheirThread) {
  start(0);
  constexpr int kThreads = 4;
  constexpr int kEach = 2000;
  std::map<int, std::vector<int>> seen;
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      for (int index = 0; index < kEach; ++index)
        loop_->call([&seen, thread, index] { seen[thread].push_back(index); });
    });
  }
  threads.emplace_back([&] { loop_->drive(kSecond / 100, [] { return false; }); });
  for (std::thread& thread : threads) thread.join();
  loop_->stop();
  for (int thread = 0; thread < kThreads; ++thread) {
    ASSERT_EQ(seen[thread].size(), static_cast<std::size_t>(kEach));
    for (int index = 0; index < kEach; ++index) ASSERT_EQ(seen[thread][static_cast<std::size_t>(index)], index);
  }
}

TEST_F(ProgressLoopTest, TheThreadSeesDescriptorsAndDeadlinesByItself) {
  start(0);
  owner_.event.set();
  EXPECT_TRUE(comes_true([&] { return read(owner_.num_ready) == 1; }));
  int num_due = 0;
  call_and_wait(*loop_, [&] {
    owner_.deadline = SteadyClock().now() + kMillisecond;
    owner_.on_advance = [&](TimeNs now) {
      if (now < owner_.deadline) return false;
      ++num_due;
      owner_.deadline = ProgressLoop::kNever;
      return true;
    };
    loop_->kick();
  });
  EXPECT_TRUE(comes_true([&] { return read(num_due) == 1; }));
}

TEST_F(ProgressLoopTest, ADescriptorThatCanNotBeWatchedEndsNothing) {
  start(0);
  call_and_wait(*loop_, [this] { EXPECT_FALSE(loop_->watch(-1, EPOLLIN, kTag + 1)); });
  owner_.event.set();
  EXPECT_TRUE(comes_true([this] { return owner_.num_ready == 1; })) << "the others are watched as before";
}

TEST_F(ProgressLoopTest, ADriverDoesTheWorkAndHandsTheLoopBack) {
  start(kForeverSpin);
  std::atomic<bool> is_over = false;
  owner_.event.set();
  std::thread watcher([&] {
    EXPECT_TRUE(comes_true([&] { return read(owner_.num_ready) > 0 && read(owner_.num_advances) > 100; }));
    is_over = true;
  });
  EXPECT_EQ(loop_->drive(kPatience, [&] { return is_over.load(); }), std::optional<bool>(true));
  watcher.join();
  EXPECT_FALSE(read(owner_.is_spinning));
  const int num_ready = read(owner_.num_ready);
  owner_.event.set();
  EXPECT_TRUE(comes_true([&] { return read(owner_.num_ready) > num_ready; })) << "the thread did not come back";
  EXPECT_NE(read(owner_.ready_by), std::this_thread::get_id());
}

TEST_F(ProgressLoopTest, ADriverGivesUpAfterItsTime) {
  for (const TimeNs spin_ns : {TimeNs{0}, kForeverSpin}) {
    start(spin_ns);
    const SteadyClock clock;
    const TimeNs began_at = clock.now();
    EXPECT_EQ(loop_->drive(20 * kMillisecond, [] { return false; }), std::optional<bool>(false));
    EXPECT_GE(clock.now() - began_at, 20 * kMillisecond);
    EXPECT_EQ(loop_->drive(0, [] { return false; }), std::optional<bool>(false));
    EXPECT_EQ(loop_->drive(0, [] { return true; }), std::optional<bool>(true));
    EXPECT_EQ(loop_->drive(ProgressLoop::kNever, [] { return true; }), std::optional<bool>(true));
  }
}

TEST_F(ProgressLoopTest, OneDriverAtATime) {
  start(0);
  std::atomic<bool> is_over = false;
  std::atomic<bool> is_inside = false;
  std::thread first([&] {
    const auto over = [&] {
      is_inside = true;
      return is_over.load();
    };
    EXPECT_EQ(loop_->drive(kPatience, over), std::optional<bool>(true));
  });
  EXPECT_TRUE(comes_true([&] { return is_inside.load(); }));
  EXPECT_EQ(loop_->drive(kPatience, [] { return true; }), std::nullopt);
  loop_->call([&] {
    is_over = true;
    loop_->kick();
  });
  first.join();
  EXPECT_EQ(loop_->drive(kPatience, [] { return true; }), std::optional<bool>(true));
}

TEST_F(ProgressLoopTest, ADriverWarnsItsPeersBeforeItSleepsAndLooksOnceMore) {
  // The thread is not started, so only the driver writes to the log.
  loop_ = std::make_unique<ProgressLoop>(owner_, "test", 0, 0);
  EXPECT_EQ(loop_->drive(30 * kMillisecond, [] { return false; }), std::optional<bool>(false));
  EXPECT_EQ(owner_.log.substr(0, 4), "TAFA");
  EXPECT_EQ(owner_.log.find_first_not_of('A', 4), std::string::npos) << owner_.log;
  EXPECT_LT(owner_.num_advances, 10) << "it did not sleep";

  owner_.log.clear();
  loop_ = std::make_unique<ProgressLoop>(owner_, "test", kForeverSpin, 0);
  EXPECT_EQ(loop_->drive(kMillisecond, [] { return false; }), std::optional<bool>(false));
  EXPECT_EQ(owner_.log.front(), 'T');
  EXPECT_EQ(owner_.log.substr(owner_.log.size() - 3), "AFA") << "whoever came in between woke nobody";
  EXPECT_EQ(owner_.log.find_first_not_of('A', 1), owner_.log.size() - 2);
}

TEST_F(ProgressLoopTest, ADriverWithWorkLeftNeitherSleepsNorWaitsForADescriptor) {
  loop_ = std::make_unique<ProgressLoop>(owner_, "test", 0, 0);
  owner_.on_advance = [](TimeNs) { return true; };
  EXPECT_EQ(loop_->drive(kPatience, [&] { return owner_.num_advances > 1000; }), std::optional<bool>(true));
  EXPECT_EQ(owner_.log.find('F'), owner_.log.size() - 2);
}

TEST_F(ProgressLoopTest, ASleepingDriverIsWokenByADescriptorAndByAKick) {
  start(0);
  const auto expect_woken_by = [&](const std::function<void()>& wake, const std::function<bool()>& is_over) {
    call_and_wait(*loop_, [&] { owner_.log.clear(); });
    std::thread waker([&] {
      EXPECT_TRUE(comes_true([&] { return read(owner_.log).find("FA") != std::string::npos; }));
      // the driver sleeps by now; if it does not, the test must pass too
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      wake();
    });
    EXPECT_EQ(loop_->drive(kPatience, is_over), std::optional<bool>(true));
    waker.join();
  };
  std::atomic<int> num_ready = 0;
  call_and_wait(*loop_, [&] {
    owner_.on_advance = [&](TimeNs) {
      num_ready = owner_.num_ready;
      return false;
    };
  });
  for (int round = 1; round < 10; ++round)
    expect_woken_by([&] { owner_.event.set(); }, [&] { return num_ready >= round; });
  for (int round = 0; round < 10; ++round) {
    std::atomic<bool> is_kicked = false;
    const auto kick = [&] {
      is_kicked = true;
      loop_->kick();
    };
    expect_woken_by([&] { loop_->call(kick); }, [&] { return is_kicked.load(); });
  }
}

TEST_F(ProgressLoopTest, NoWakeUpIsLostBetweenTheThreadAndADriver) {
  start(0);
  std::atomic<int> num_ready = 0;
  call_and_wait(*loop_, [&] {
    owner_.on_advance = [&](TimeNs) {
      num_ready = owner_.num_ready;
      return false;
    };
  });
  std::mt19937_64 random(1);
  for (int round = 0; round < 300; ++round) {
    // Sometimes this is longer than the thread waits for the driver to return, so the thread sleeps too.
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 500));
    const int seen = read(owner_.num_ready);
    std::atomic<bool> has_run = false;
    std::thread other([&, delay_us = random() % 300] {
      std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
      loop_->call([&] {
        has_run = true;
        loop_->kick();
      });
      owner_.event.set();
    });
    const auto is_over = [&] { return has_run && num_ready > seen; };
    ASSERT_EQ(loop_->drive(kPatience, is_over), std::optional<bool>(true)) << "in round " << round;
    other.join();
  }
}

TEST_F(ProgressLoopTest, StopSendsTheDriverHomeAndRunsWhatWasPosted) {
  for (const TimeNs spin_ns : {TimeNs{0}, kForeverSpin}) {
    start(spin_ns);
    std::atomic<bool> is_inside = false;
    std::thread driver([&] {
      const auto never = [&] {
        is_inside = true;
        return false;
      };
      EXPECT_EQ(loop_->drive(kPatience, never), std::optional<bool>(false));
    });
    EXPECT_TRUE(comes_true([&] { return is_inside.load(); }));
    std::atomic<int> num_run = 0;
    constexpr int kCalls = 500;
    std::thread caller([&] {
      for (int index = 0; index < kCalls; ++index) loop_->call([&] { ++num_run; });
    });
    loop_->stop();
    const int num_advances = owner_.num_advances;  // from now on, only the tasks of the caller use the loop
    caller.join();
    driver.join();
    EXPECT_EQ(num_run, kCalls);
    EXPECT_EQ(loop_->drive(kPatience, [] { return false; }), std::optional<bool>(false)) << "and at once";
    EXPECT_EQ(owner_.num_advances, num_advances) << "called after stop()";
    loop_->stop();
  }
}

TEST_F(ProgressLoopTest, StopReachesTheThreadAlthoughADriverTakesWakeUpsFromIt) {
  std::mt19937_64 random(2);
  for (int round = 0; round < 1000; ++round) {
    start(0);
    std::atomic<bool> is_over = false;
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 400));  // so that the thread sometimes sleeps too
    std::thread driver(
        [&] { EXPECT_EQ(loop_->drive(kPatience, [&] { return is_over.load(); }), std::optional<bool>(true)); });
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 400));
    loop_->call([&] { is_over = true; });
    loop_->stop();  // the test fails if this call hangs
    driver.join();
  }
}

TEST_F(ProgressLoopTest, ADeadlineThatADriverLeavesBehindIsKept) {
  start(0);
  std::mt19937_64 random(3);
  for (int round = 0; round < 100; ++round) {
    // the thread is parked, asleep, or about to sleep
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 800));
    loop_->drive(kMillisecond, [] { return false; });
    std::atomic<bool> is_due = false;
    loop_->drive(kMillisecond, [&] {
      loop_->call([&] {
        owner_.deadline = SteadyClock().now() + 5 * kMillisecond;
        owner_.on_advance = [&](TimeNs now) {
          if (now < owner_.deadline) return false;
          owner_.deadline = ProgressLoop::kNever;
          is_due = true;
          return false;
        };
      });
      return true;
    });
    ASSERT_TRUE(comes_true([&] { return is_due.load(); })) << "in round " << round;
  }
}

TEST_F(ProgressLoopTest, CallsAfterStopAllRun) {
  start(0);
  loop_->stop();
  std::atomic<int> num_run = 0;
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&] {
      for (int index = 0; index < 2000; ++index) call_and_wait(*loop_, [&] { ++num_run; });
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(num_run, 8000);
}

}  // namespace
}  // namespace kvferry
