#include "kernels/cuda/gpu_support.h"

#include <gtest/gtest.h>

#include "kernels/stream_packer.h"

namespace kvferry {
namespace {

TEST(GpuSupport, NamesTheKernelsAndTheRuntimeOfThisBuild) {
  const std::string support = gpu_support();
  EXPECT_TRUE(support.starts_with("CUDA kernels for sm_")) << support;
  EXPECT_NE(support.find(fmt::format("; runtime of CUDA {}.", CUDART_VERSION / 1000)), std::string::npos) << support;
}

TEST(GpuSupport, SaysWhatAHostWithoutUsableGpusLacks) {
  const std::string needed = fmt::format("a driver for CUDA {}.0 or later", CUDART_VERSION / 1000);
  const auto has = [](const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
  };
  const std::string no_driver = explain_no_gpus(cudaErrorInsufficientDriver, 0);
  EXPECT_TRUE(has(no_driver, "no NVIDIA driver") && has(no_driver, needed)) << no_driver;
  const std::string old_driver = explain_no_gpus(cudaErrorInsufficientDriver, 11040);
  EXPECT_TRUE(has(old_driver, "for CUDA 11.4") && has(old_driver, needed)) << old_driver;
  EXPECT_EQ(explain_no_gpus(cudaErrorNoDevice, CUDART_VERSION), "NVIDIA's driver finds no GPU on this host");
  EXPECT_TRUE(explain_no_gpus(cudaErrorUnknown, CUDART_VERSION).starts_with("cannot count the GPUs: "));
}

}  // namespace
}  // namespace kvferry
