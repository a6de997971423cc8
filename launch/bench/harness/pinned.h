// Threads on cores of their own while something is measured.
#pragma once

#include <sched.h>

#include <cstddef>

namespace kvferry::bench {

/// For good. A core that isn't there: the thread stays free.
inline void pin_calling_thread(int core) {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  CPU_SET(static_cast<std::size_t>(core), &cores);
  ::sched_setaffinity(0, sizeof cores, &cores);
}

/// This thread, and those that it starts meanwhile, until the end of the block.
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
