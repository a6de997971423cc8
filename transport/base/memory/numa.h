// The NUMA node on which the kernel places a thread's new memory.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace kvferry {

/// While this object exists, pages that the calling thread touches first are allocated on this NUMA node if the kernel
/// allows it, or on another one if the node has no free page. A thread that has a memory policy already, set by numactl
/// for example, keeps it. The thread that made the object must destroy it.
class NumaPreference {
 public:
  /// Does nothing if `node` is negative or at least 1024.
  explicit NumaPreference(int node);
  NumaPreference(const NumaPreference&) = delete;
  NumaPreference& operator=(const NumaPreference&) = delete;
  ~NumaPreference();

 private:
  bool is_set_ = false;
};

/// Returns the NUMA node of the page that contains `memory`, which must have been touched; -1 if the node is unknown.
int numa_node_at(const std::byte* memory);

}  // namespace kvferry
