#include "transport/shm/copy_thread_pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>

#include "transport/base/clock.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvferry::shm {
namespace {

constexpr TimeNs kSpinNs = 50'000;
constexpr int kLooksPerClock = 64;  // reads of round_ for each reading of the clock, which costs more

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

/// Returns the number of threads that copy. It is small, because a few threads reach the memory's bandwidth and vLLM
/// needs CPUs as well.
std::uint32_t threads_for_this_machine() {
  cpu_set_t allowed;
  if (::sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return 1;
  const int count = CPU_COUNT(&allowed);
  return count < 2 ? 1 : count < 16 ? 2 : 4;
}

}  // namespace

CopyThreadPool::CopyThreadPool(std::uint32_t num_threads) {
  const std::uint32_t wanted = num_threads == 0 ? threads_for_this_machine() : num_threads;
  for (std::uint32_t index = 1; index < wanted; ++index) helpers_.emplace_back(&CopyThreadPool::help, this);
}

CopyThreadPool::~CopyThreadPool() {
  is_stopping_ = true;
  round_ += 2;
  round_.notify_all();
  for (std::thread& helper : helpers_) helper.join();
}

void CopyThreadPool::share(std::size_t num_parts, const std::function<void(std::size_t)>& task) {
  if (helpers_.empty() || num_parts < 2) {
    for (std::size_t part = 0; part < num_parts; ++part) task(part);
    return;
  }
  num_parts_ = num_parts;
  task_ = &task;
  next_part_.store(0, std::memory_order_relaxed);
  ++round_;
  if (num_asleep_ > 0) round_.notify_all();
  work();
  ++round_;
  while (num_inside_ > 0) relax();
}

void CopyThreadPool::work() {
  while (true) {
    const std::size_t part = next_part_.fetch_add(1, std::memory_order_relaxed);
    if (part >= num_parts_) return;
    (*task_)(part);
  }
}

std::uint32_t CopyThreadPool::await_change(std::uint32_t seen) {
  const SteadyClock clock;
  const TimeNs ends_at = clock.now() + kSpinNs;
  do {
    for (int look = 0; look < kLooksPerClock; ++look) {
      if (const std::uint32_t now = round_.load(std::memory_order_relaxed); now != seen) return round_;
      relax();
    }
  } while (clock.now() < ends_at);
  ++num_asleep_;
  round_.wait(seen);
  --num_asleep_;
  return round_;
}

void CopyThreadPool::help() {
  ::pthread_setname_np(::pthread_self(), "kvferry-copy");
  std::uint32_t seen = 0;
  while (true) {
    seen = await_change(seen);
    if (is_stopping_) return;
    if (seen % 2 == 0) continue;
    ++num_inside_;
    if (round_ == seen) work();
    --num_inside_;
  }
}

}  // namespace kvferry::shm
