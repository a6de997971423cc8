#include "transport/base/memory/numa.h"

#include <gtest/gtest.h>
#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace kvferry {
namespace {

int policy() {
  int mode = -1;
  ::syscall(SYS_get_mempolicy, &mode, nullptr, 0UL, nullptr, 0UL);
  return mode;
}

TEST(NumaPreference, HoldsWhileItExistsAndNotLonger) {
  if (policy() != MPOL_DEFAULT) GTEST_SKIP() << "the process was started with a policy, or may not ask for it";
  {
    const NumaPreference none(-1);
    EXPECT_EQ(policy(), MPOL_DEFAULT);
    const NumaPreference first(0);
    if (policy() == MPOL_DEFAULT) GTEST_SKIP() << "the kernel lets this process set no policy";
    EXPECT_EQ(policy(), MPOL_PREFERRED);
    const NumaPreference too_high(1 << 20);
    const NumaPreference second(0);  // leaves the policy that the thread has
  }
  EXPECT_EQ(policy(), MPOL_DEFAULT);
}

TEST(NumaPreference, TellsThePlaceOfAPage) {
  constexpr std::size_t kBytes = 4096;
  void* const page = ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(page, MAP_FAILED);
  *static_cast<char*>(page) = 1;
  EXPECT_GE(numa_node_at(static_cast<const std::byte*>(page)), policy() < 0 ? -1 : 0);
  ::munmap(page, kBytes);
  EXPECT_EQ(numa_node_at(nullptr), -1);
}

}  // namespace
}  // namespace kvferry
