// Threads on cores of their own while something is measured.
#pragma once

#include <sched.h>

namespace kvferry::bench {

/// This thread, and those that it starts meanwhile, until the end of the block.
class PinnedHere {
 public:
  explicit PinnedHere(int core) {
    ::sched_getaffinity(0, sizeof before_, &before_);
    pin(core);
  }
  PinnedHere(const PinnedHere&) = delete;
  PinnedHere& operator=(const PinnedHere&) = delete;
  ~PinnedHere() { ::sched_setaffinity(0, sizeof before_, &before_); }

  /// For good. A core that isn't there: it stays free.
  static void pin(int core) {
    cpu_set_t cores;
    CPU_ZERO(&cores);
    CPU_SET(core, &cores);
    ::sched_setaffinity(0, sizeof cores, &cores);
  }

 private:
  cpu_set_t before_{};
};

}  // namespace kvferry::bench
