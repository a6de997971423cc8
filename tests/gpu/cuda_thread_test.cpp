// Tests what Device and packer leave behind on the threads that call them: contexts, the current device, errors.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/current_device.h"
#include "tests/gpu/device_cache.h"
#include "tests/gpu/fresh_process.h"

namespace kvferry {
namespace {

class CudaThread : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = why_no_gpu(); !why.empty()) GTEST_SKIP() << "needs a GPU: " << why;
    int count = 0;
    cudaGetDeviceCount(&count);
    if (count < 2) GTEST_SKIP() << "needs two GPUs";
  }
};

int current_device_of_thread() {
  int device = -1;
  cudaGetDevice(&device);
  return device;
}

/// Calls that a rank on GPU 1 makes of its device and packer, with objects that the caller destroys.
struct Rank {
  std::shared_ptr<Device> device = make_cuda_device(1).value();
  std::byte* memory = nullptr;
  DeviceStream stream = nullptr;
  std::unique_ptr<StreamPacker> packer;
  std::unique_ptr<StreamPacker::Pass> pass;
  std::unique_ptr<Device::Checksums> checksums;

  void work() {
    memory = device->allocate(MemoryKind::kDevice, 1 << 20).value();
    stream = device->make_stream().value();
    std::vector<DeviceCopy> copies;
    for (std::uint64_t i = 0; i < 40; ++i) copies.push_back({memory + i * 100, memory + (1 << 19) + i * 100, 100});
    EXPECT_TRUE(device->copy(copies, stream));
    const std::vector<std::span<const std::byte>> ranges = {{memory, 5000}};
    checksums = device->checksums(ranges, stream).value();
    KvLayout layout = TestCache(CacheShape{}).layout();
    for (LayerLayout& layer : layout.layers)
      layer.key.base = layer.value.base = reinterpret_cast<std::uint64_t>(memory);
    packer = make_cuda_packer(1, layout).value();
    const std::vector<std::vector<BlockId>> tables = {{0, 1}};
    const PackerJob job{{0, 2, tables}, memory + (1 << 19), 2 * packer->chunk_bytes_per_token(), 2, 0};
    pass = packer->gather(std::span(&job, 1), stream, true).value();
    EXPECT_TRUE(pass->copy_layers(0, static_cast<std::uint32_t>(layout.layers.size())));
    EXPECT_TRUE(pass->finish());
    EXPECT_TRUE(pass->wait());
  }
  void end() {
    pass.reset();
    packer.reset();
    checksums.reset();
    device->release(MemoryKind::kDevice, memory);
    device->drop_stream(stream);
    device.reset();
  }
};

TEST_F(CudaThread, ARankMakesNoContextOnAnotherRanksGpu) {
  in_fresh_process([] {
    Rank rank;
    std::thread([&] {
      EXPECT_TRUE(rank.device->bind_thread());
      EXPECT_EQ(current_device_of_thread(), 1);
      rank.work();
      EXPECT_EQ(current_device_of_thread(), 1);
    }).join();
    std::thread([&] { rank.end(); }).join();  // this thread has never called CUDA
    EXPECT_TRUE(has_context(1));
    EXPECT_FALSE(has_context(0));
  });
}

TEST_F(CudaThread, WhatIsDestroyedOnAnotherThreadMakesNoContextEither) {
  in_fresh_process([] {
    Rank rank;
    const auto elsewhere = [](auto call) {
      std::thread(call).join();
      EXPECT_FALSE(has_context(0));
    };
    elsewhere([&] { rank.work(); });
    elsewhere([&] { rank.pass.reset(); });
    elsewhere([&] { rank.packer.reset(); });
    elsewhere([&] { rank.checksums.reset(); });
    elsewhere([&] { rank.device->release(MemoryKind::kDevice, rank.memory); });
    elsewhere([&] { rank.device->drop_stream(rank.stream); });
    elsewhere([&] { rank.device.reset(); });
  });
}

TEST_F(CudaThread, AnEnginesThreadKeepsItsDevice) {
  in_fresh_process([] {
    EXPECT_EQ(cudaSetDevice(0), cudaSuccess);
    Rank rank;
    rank.work();
    EXPECT_EQ(current_device_of_thread(), 0);
    rank.end();
    EXPECT_EQ(current_device_of_thread(), 0);
  });
}

class CudaErrors : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = why_no_gpu(); !why.empty()) GTEST_SKIP() << "needs a GPU: " << why;
    cudaGetLastError();
    device_ = make_cuda_device(0).value();
  }
  std::shared_ptr<Device> device_;
};

TEST_F(CudaErrors, ALaunchDoesNotReportWhatFailedBefore) {
  const DeviceBytes memory(5000);
  const std::vector<std::span<const std::byte>> ranges = {{memory.data(), memory.size()}};
  void* big = nullptr;
  ASSERT_EQ(cudaMalloc(&big, std::size_t{1} << 50), cudaErrorMemoryAllocation);
  const auto checksums = device_->checksums(ranges, nullptr);
  ASSERT_TRUE(checksums) << checksums.error().what;
  EXPECT_TRUE((*checksums)->take());
}

TEST_F(CudaErrors, AFailedCallLeavesNoErrorToTheEngine) {
  std::byte on_stack[8];
  EXPECT_EQ(device_->allocate(MemoryKind::kDevice, std::uint64_t{1} << 50).error().code, ErrorCode::kFull);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  EXPECT_FALSE(device_->export_memory(on_stack));
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

/// Host memory that begins at a page, which another library may have registered.
class CudaPins : public CudaErrors {
 protected:
  static constexpr std::size_t kPage = 4096;
  std::unique_ptr<std::byte, decltype(&std::free)> memory_{
      static_cast<std::byte*>(std::aligned_alloc(kPage, 8 * kPage)), &std::free};
  std::span<std::byte> pages(std::size_t first, std::size_t count) const {
    return {memory_.get() + first * kPage, count * kPage};
  }
  bool is_pinned(std::size_t page) const {
    cudaPointerAttributes attributes{};
    return cudaPointerGetAttributes(&attributes, memory_.get() + page * kPage) == cudaSuccess &&
           attributes.type == cudaMemoryTypeHost;
  }
};

TEST_F(CudaPins, MemoryThatAnotherLibraryPinnedIsPinnedAndStaysItsOwn) {
  ASSERT_EQ(cudaHostRegister(memory_.get(), 4 * kPage, cudaHostRegisterPortable), cudaSuccess);
  const Result<void> pinned = device_->pin(pages(1, 3));
  ASSERT_TRUE(pinned) << pinned.error().what;
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  ASSERT_TRUE(device_->pin(pages(1, 3)));
  device_->unpin(pages(1, 3));
  device_->unpin(pages(1, 3));
  ASSERT_TRUE(device_->pin(pages(0, 4)));
  device_->unpin(pages(0, 4));
  EXPECT_TRUE(is_pinned(1)) << "the other library still needs it";
  EXPECT_FALSE(device_->pin(pages(2, 4))) << "only a part of it is pinned";
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  EXPECT_EQ(cudaHostUnregister(memory_.get()), cudaSuccess);
}

TEST_F(CudaPins, OwnPinsMayNotOverlap) {
  ASSERT_TRUE(device_->pin(pages(0, 4)));
  EXPECT_FALSE(device_->pin(pages(1, 2)));
  EXPECT_FALSE(device_->pin(pages(3, 2)));
  device_->unpin(pages(0, 4));
  EXPECT_FALSE(is_pinned(0));
  EXPECT_TRUE(device_->pin(pages(1, 2)));
  device_->unpin(pages(1, 2));
}

}  // namespace
}  // namespace kvferry
