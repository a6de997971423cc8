// Tests the promises of Device with CUDA's device.
#include "kernels/cuda/cuda_device.h"

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <regex>

#include "kernels/stream_packer.h"
#include "tests/gpu/device_cache.h"
#include "tests/kernels/random_cache.h"
#include "transport/base/checksum.h"

namespace kvferry {
namespace {

class CudaDeviceTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = why_no_gpu(); !why.empty()) GTEST_SKIP() << "needs a GPU: " << why;
    device_ = make_cuda_device(0).value();
    stream_ = device_->make_stream().value();
  }
  void TearDown() override {
    if (device_ != nullptr) device_->drop_stream(stream_);
  }

  std::shared_ptr<Device> device_;
  DeviceStream stream_ = nullptr;
};

TEST_F(CudaDeviceTest, CopiesAnyNumberOfRangesOfAnySizeAndAlignment) {
  for (std::uint32_t seed = 0; seed < 30; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random random(seed);
    constexpr std::uint64_t kRangeMax = 20'000;
    const std::uint32_t ranges = random.number(1, seed % 10 == 0 ? 3000 : 40);
    const std::vector<std::byte> source = random.bytes(kRangeMax * 2 + (1 << 20));
    const DeviceBytes from(source), to(ranges * kRangeMax);
    std::vector<std::byte> expected(to.size(), std::byte{0});
    const_cast<DeviceBytes&>(to).set(expected);
    std::vector<DeviceCopy> copies;
    for (std::uint32_t i = 0; i < ranges; ++i) {
      const std::uint64_t step = random.once_in(2) ? 1 : 16;
      const std::uint64_t bytes = random.number(0, 1000) * step, at = random.number(0, 1000) * step,
                          into = i * kRangeMax + random.number(0, 100) * step;
      copies.push_back({to.data() + into, from.data() + at, bytes});
      std::copy_n(source.begin() + static_cast<std::ptrdiff_t>(at), bytes,
                  expected.begin() + static_cast<std::ptrdiff_t>(into));
    }
    ASSERT_TRUE(device_->copy(copies, stream_));
    ASSERT_TRUE(DeviceEvent::record(*device_, stream_).value().wait());
    ASSERT_EQ(to.get(), expected);
  }
}

TEST_F(CudaDeviceTest, TellsItsPlaceAndItsUuid) {
  const std::string place = device_->pci_bus_id();
  EXPECT_TRUE(std::regex_match(place, std::regex("[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\\.0"))) << place;
  const bool is_real =
      std::filesystem::exists("/proc/driver/nvidia") && std::filesystem::exists("/sys/bus/pci/devices");
  EXPECT_TRUE(!is_real || std::filesystem::exists("/sys/bus/pci/devices/" + place)) << place;
  const std::string uuid = device_->uuid();
  EXPECT_TRUE(std::regex_match(uuid, std::regex("(GPU|MIG)-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"))) << uuid;
}

TEST_F(CudaDeviceTest, TakesTheChecksumsOfTheHost) {
  Random random(3);
  const std::vector<std::byte> bytes = random.bytes(1 << 20);
  const DeviceBytes memory(bytes);
  std::vector<std::span<const std::byte>> on_device;
  std::vector<std::uint64_t> expected;
  for (int i = 0; i < 50; ++i) {
    const std::uint64_t at = random.number(0, 1 << 18), size = random.once_in(5) ? 0 : random.number(1, 1 << 19);
    on_device.emplace_back(memory.data() + at, size);
    expected.push_back(chunk_checksum(std::span(bytes).subspan(at, size)));
  }
  const auto sums = device_->checksums(on_device, stream_).value();
  EXPECT_EQ(sums->take().value(), expected);
  EXPECT_TRUE(sums->is_done().value());
  EXPECT_TRUE(device_->checksums({}, stream_).value()->take().value().empty());
  // the checksums are dropped while the device computes them
  static_cast<void>(device_->checksums(on_device, stream_));
}

TEST_F(CudaDeviceTest, EventsOrderStreamsAndTheHost) {
  constexpr std::uint64_t kBytes = 1 << 22;
  Random random(4);
  const std::vector<std::byte> bytes = random.bytes(kBytes);
  std::byte* const pinned = device_->allocate(MemoryKind::kPinned, kBytes).value();
  std::byte* const on_device = device_->allocate(MemoryKind::kDevice, kBytes).value();
  std::vector<std::byte> back(kBytes);
  ASSERT_TRUE(device_->pin(back));
  ASSERT_TRUE(device_->pin(back)) << "once for each who wants it";
  std::copy(bytes.begin(), bytes.end(), pinned);
  const DeviceStream second = device_->make_stream().value();
  const DeviceCopy up[] = {{on_device, pinned, kBytes}};
  const DeviceCopy down[] = {{back.data(), on_device, kBytes}};
  ASSERT_TRUE(device_->copy(up, stream_));
  ASSERT_TRUE(DeviceEvent::record(*device_, stream_).value().make_wait(second));
  ASSERT_TRUE(device_->copy(down, second));
  const DeviceEvent done = DeviceEvent::record(*device_, second).value();
  ASSERT_TRUE(done.wait());
  EXPECT_TRUE(done.is_reached().value());
  EXPECT_EQ(back, bytes);
  device_->unpin(back);
  device_->unpin(back);
  device_->drop_stream(second);
  device_->release(MemoryKind::kDevice, on_device);
  device_->release(MemoryKind::kPinned, pinned);
}

TEST_F(CudaDeviceTest, ExportsMemoryAndKnowsItsOwn) {
  std::byte* const memory = device_->allocate(MemoryKind::kDevice, 1 << 20).value();
  const std::string exported = device_->export_memory({memory + 4096, 1000}).value();
  EXPECT_EQ(device_->open_memory(exported, 1000).value(), memory + 4096);
  device_->close_memory(memory + 4096);
  EXPECT_EQ(device_->export_memory({memory, 1 << 30}).error().code, ErrorCode::kUnavailable) << "beyond its allocation";
  std::byte on_stack[8];
  EXPECT_EQ(device_->export_memory(on_stack).error().code, ErrorCode::kUnavailable);
  EXPECT_FALSE(device_->open_memory("garbage", 1));
  EXPECT_EQ(device_->open_memory(exported, 1001).error().code, ErrorCode::kCorrupt) << "more than was exported";
  device_->release(MemoryKind::kDevice, memory);
}

TEST_F(CudaDeviceTest, NamesTheGpuThatHasTooLittleMemory) {
  const auto memory = device_->allocate(MemoryKind::kDevice, std::uint64_t{1} << 50);
  ASSERT_FALSE(memory);
  EXPECT_EQ(memory.error().code, ErrorCode::kFull);
  EXPECT_NE(memory.error().what.find("memory of " + device_->describe()), std::string::npos) << memory.error().what;
}

TEST(CudaDevice, RefusesGpusThatThereAreNot) {
  const auto gpu = open_gpu(1000);
  ASSERT_FALSE(gpu);
  EXPECT_EQ(gpu.error().code, ErrorCode::kUnavailable);
}

}  // namespace
}  // namespace kvferry
