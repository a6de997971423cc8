#include "transport/base/memory/numa.h"

#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <climits>

#include "transport/base/log.h"

namespace kvferry {
namespace {

constexpr int kNodesMax = 1024;
constexpr int kBitsPerWord = sizeof(unsigned long) * CHAR_BIT;

// The C library has no functions for the system calls set_mempolicy and get_mempolicy, and libnuma would be another
// dependency.
long set_policy(int mode, const unsigned long* nodes, unsigned long num_bits) {
  return ::syscall(SYS_set_mempolicy, mode, nodes, num_bits);
}

}  // namespace

NumaPreference::NumaPreference(int node) {
  if (node < 0 || node >= kNodesMax) return;
  int mode = MPOL_DEFAULT;
  if (::syscall(SYS_get_mempolicy, &mode, nullptr, 0UL, nullptr, 0UL) != 0 || mode != MPOL_DEFAULT) return;
  std::array<unsigned long, kNodesMax / kBitsPerWord> nodes{};
  nodes[static_cast<std::size_t>(node / kBitsPerWord)] |= 1UL << (node % kBitsPerWord);
  is_set_ = set_policy(MPOL_PREFERRED, nodes.data(), kNodesMax) == 0;
  if (!is_set_)
    log().info(
        "the kernel does not let this process choose NUMA node {} for its pool, which may be slower then (a container "
        "may need the capability SYS_NICE)",
        node);
}

NumaPreference::~NumaPreference() {
  if (is_set_) set_policy(MPOL_DEFAULT, nullptr, 0);
}

int numa_node_at(const std::byte* memory) {
  int node = -1;
  constexpr unsigned long kFlags = MPOL_F_NODE | MPOL_F_ADDR;
  return ::syscall(SYS_get_mempolicy, &node, nullptr, 0UL, memory, kFlags) == 0 ? node : -1;
}

}  // namespace kvferry
