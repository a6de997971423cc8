// Checks at the end of a program that its tests made contexts on GPU 0 alone and gave back what they took. A test that
// needs another GPU runs in_fresh_process().
#include "tests/gpu/gpu_environment.h"

#include <cuda_runtime.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/cuda/current_device.h"

namespace kvferry {
namespace {

class GpuEnvironment final : public ::testing::Environment {
 public:
  void TearDown() override {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess) return;
    for (int device = 1; device < count; ++device) EXPECT_FALSE(has_context(device)) << "GPU " << device;
    EXPECT_THAT(cuda_leaks(), ::testing::IsEmpty());
    EXPECT_EQ(cudaGetLastError(), cudaSuccess) << "a test left an error behind";
  }
};

[[maybe_unused]] const auto* const environment = ::testing::AddGlobalTestEnvironment(new GpuEnvironment);

}  // namespace
}  // namespace kvferry
