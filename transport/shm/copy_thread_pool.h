// Threads that share large copies with the thread that moves the transfer. Private to this folder.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace kvferry::shm {

/// Threads that share the work of a copy with the calling thread. One thread's copy is limited by its outstanding cache
/// misses, far below the memory's bandwidth, so several threads copy faster. After a share() of two or more parts the
/// helper threads spin for a moment, since the same transfer's next share() may follow soon, and then sleep.
class CopyThreadPool {
 public:
  /// `num_threads` includes the caller of share(); 0: chosen by the number of processors this process may use.
  explicit CopyThreadPool(std::uint32_t num_threads);
  ~CopyThreadPool();
  CopyThreadPool(const CopyThreadPool&) = delete;
  CopyThreadPool& operator=(const CopyThreadPool&) = delete;

  std::size_t num_threads() const { return helpers_.size() + 1; }
  /// Runs task(0) to task(num_parts - 1), each once, on this thread and on helpers; returns when all have ended. One
  /// caller at a time. The task must not throw.
  void share(std::size_t num_parts, const std::function<void(std::size_t)>& task);

 private:
  void help();
  void work();
  std::uint32_t await_change(std::uint32_t seen);

  std::size_t num_parts_ = 0;
  const std::function<void(std::size_t)>* task_ = nullptr;
  std::atomic<std::size_t> next_part_{0};
  // round_ is odd while helpers may take parts. A helper increments num_inside_ and then checks that its round is still
  // open; the caller of share() closes the round and then waits until num_inside_ is 0.
  std::atomic<std::uint32_t> round_{0};
  std::atomic<std::uint32_t> num_inside_{0};
  std::atomic<std::uint32_t> num_asleep_{0};
  std::atomic<bool> is_stopping_{false};
  std::vector<std::thread> helpers_;
};

}  // namespace kvferry::shm
