// Pins threads to cores while something is measured.
#pragma once

#include <sched.h>

#include <cstddef>

namespace kvferry::bench {

/// Pins the calling thread to a core until the thread ends. If the core does not exist, the thread stays unpinned.
inline void pin_calling_thread(int core) {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  CPU_SET(static_cast<std::size_t>(core), &cores);
  ::sched_setaffinity(0, sizeof cores, &cores);
}

/// Pins the calling thread to a core until the object is destroyed. Threads and processes that the calling thread
/// starts in the meantime stay pinned afterwards.
class PinnedHere {
 public:
  explicit PinnedHere(int core) {
    ::sched_getaffinity(0, sizeof before_, &before_);
    pin_calling_thread(core);
  }
  PinnedHere(const PinnedHere&) = delete;
  PinnedHere& operator=(const PinnedHere&) = delete;
  ~PinnedHere() { ::sched_setaffinity(0, sizeof before_, &before_); }

 private:
  cpu_set_t before_{};
};

}  // namespace kvferry::bench
