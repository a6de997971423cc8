// The NUMA node of which a thread's new memory is.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace kvferry {

/// While it exists, pages that the calling thread touches first are of this NUMA node if the node has free ones, and of
/// others if not. A thread that had a policy of its own, set by numactl for example, keeps it. Threads: to be destroyed
/// by the thread that made it.
class NumaPreference {
 public:
  /// Does nothing if `node` is negative.
  explicit NumaPreference(int node);
  NumaPreference(const NumaPreference&) = delete;
  NumaPreference& operator=(const NumaPreference&) = delete;
  ~NumaPreference();

 private:
  bool is_set_ = false;
};

/// Returns the NUMA node of the page that contains `memory`, which must have been touched; -1 if it is unknown.
int numa_node_at(const std::byte* memory);

}  // namespace kvferry
