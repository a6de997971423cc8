// Tests the parts of NCCL's library that work without a GPU. Built with the transport's tests and, if the build has
// NCCL's header, with the GPU tests.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "tests/device/sim_device.h"
#include "transport/nccl/communicators.h"

#ifndef KVFERRY_TEST_NCCL
#define KVFERRY_TEST_NCCL ""  // the path at which the loader finds the library
#endif

namespace kvferry {
namespace {

using ::testing::HasSubstr;

TEST(NcclLibrary, SaysWhatToInstallWhereItIsMissing) {
  for (const char* const path : {"/nowhere/libnccl.so.2", "libc.so.6"}) {
    const Result<std::string> found = nccl::find_nccl(path);
    ASSERT_FALSE(found);
    EXPECT_EQ(found.error().code, ErrorCode::kUnavailable);
    EXPECT_THAT(found.error().what, HasSubstr("nvidia-nccl-cu13"));
  }
}

TEST(NcclLibrary, TellsItsVersionWithoutAGpu) {
  const char* const path = std::getenv("KVFERRY_NCCL_LIBRARY") == nullptr ? KVFERRY_TEST_NCCL : "";
  const Result<std::string> found = nccl::find_nccl(path);
  if (!found) GTEST_SKIP() << found.error().what;
  EXPECT_THAT(*found, HasSubstr("NCCL 2."));
  SimDevice device(1);
  EXPECT_EQ(nccl::open_nccl(path, device).error().code, ErrorCode::kUnavailable) << "it is no GPU of CUDA's";
  EXPECT_EQ(device.num_alive(), 0U);
}

}  // namespace
}  // namespace kvferry
