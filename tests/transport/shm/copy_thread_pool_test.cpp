#include "transport/shm/copy_thread_pool.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <random>
#include <set>

namespace kvferry::shm {
namespace {

TEST(CopyThreadPool, EachPartRunsOnceAndIsSeenByTheCaller) {
  std::mt19937_64 random(1);
  for (const std::uint32_t num_threads : {1U, 2U, 4U}) {
    CopyThreadPool pool(num_threads);
    EXPECT_EQ(pool.num_threads(), num_threads);
    std::uint64_t round = 0;
    for (; round < 3000; ++round) {
      // memory without synchronization, so that the thread sanitizer notices a helper that writes too late
      std::vector<std::uint64_t> written(random() % 40, 0);
      pool.share(written.size(), [&](std::size_t part) { written[part] += round + part + 1; });
      for (std::size_t part = 0; part < written.size(); ++part) ASSERT_EQ(written[part], round + part + 1);
      if (random() % 300 == 0) ::usleep(200);  // lets the helper threads fall asleep
    }
  }
}

TEST(CopyThreadPool, HelpersTakePartAlsoAfterTheySlept) {
  CopyThreadPool pool(2);
  for (int round = 0; round < 20; ++round) {
    ::usleep(1000);
    std::mutex mutex;
    std::condition_variable joined;
    std::set<std::thread::id> threads;
    pool.share(100, [&](std::size_t) {
      std::unique_lock lock(mutex);
      if (threads.insert(std::this_thread::get_id()).second) joined.notify_all();
      // The first thread holds its part until the other one has come, however busy the processors are.
      joined.wait_for(lock, std::chrono::seconds(20), [&] { return threads.size() == 2; });
    });
    EXPECT_EQ(threads.size(), 2U);
  }
}

TEST(CopyThreadPool, MachinesOfOneProcessorCopyAlone) {
  cpu_set_t before;
  ASSERT_EQ(::sched_getaffinity(0, sizeof(before), &before), 0);
  cpu_set_t one = before;
  int first = 0;
  while (!CPU_ISSET(first, &before)) ++first;
  CPU_ZERO(&one);
  CPU_SET(first, &one);
  ASSERT_EQ(::sched_setaffinity(0, sizeof(one), &one), 0);
  EXPECT_EQ(CopyThreadPool(0).num_threads(), 1U);
  ASSERT_EQ(::sched_setaffinity(0, sizeof(before), &before), 0);
  EXPECT_EQ(CopyThreadPool(0).num_threads() > 1, CPU_COUNT(&before) > 1);
}

}  // namespace
}  // namespace kvferry::shm
