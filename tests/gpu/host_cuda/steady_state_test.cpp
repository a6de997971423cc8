// Tests that work that goes on for long asks the driver for no memory and waits for nothing.
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <vector>

#include "kernels/cuda/cuda_device.h"
#include "kernels/joined_packer.h"
#include "tests/gpu/device_cache.h"
#include "tests/gpu/host_cuda/host_cuda.h"

namespace kvferry {
namespace {

TEST(SteadyState, AsksTheDriverForNothingAndFreesNothing) {
  const std::shared_ptr<Device> device = make_cuda_device(0).value();
  const DeviceStream stream = device->make_stream().value();
  const DeviceCache cache(CacheShape{}), other(CacheShape{.head_dim = 12});
  const auto packer = make_cuda_packer(0, cache.layout()).value();
  const std::vector<KvLayout> layouts = {cache.layout(), other.layout(), cache.layout()};
  const auto joined = make_joined_packer(open_gpu(0).value(), layouts, {}).value();
  const DeviceBytes chunk(2 * joined->chunk_bytes_per_token()), memory(1 << 16);
  const std::vector<std::vector<BlockId>> tables = {{0, 1}};
  const PackerJob job{{0, 2, tables}, chunk.data(), chunk.size(), 2, 0};
  const std::vector<std::span<const std::byte>> ranges = {{memory.data(), 5000}};
  std::vector<DeviceCopy> copies;
  for (std::uint64_t i = 0; i < 40; ++i)
    copies.push_back({memory.data() + i * 100, memory.data() + (1 << 15) + i * 100, 100});

  const auto wait = [&] { return DeviceEvent::record(*device, stream).value().wait(); };
  const auto save = [&] {  // more at once than a step does
    std::vector<std::unique_ptr<StreamPacker::Pass>> passes;
    std::vector<std::unique_ptr<Device::Checksums>> checksums;
    // The GPU begins when all is enqueued, so that each round needs as many buffers at a time.
    const auto begins = std::make_shared<std::atomic<bool>>(false);
    host_gpu_enqueue(static_cast<cudaStream_t>(stream), [begins] { return begins->load(); });
    for (int i = 0; i < 40; ++i) {
      for (StreamPacker* each : {packer.get(), joined.get()}) {
        passes.push_back(each->gather(std::span(&job, 1), stream, true).value());
        EXPECT_TRUE(passes.back()->copy_layers(0, each->num_layers()));
        EXPECT_TRUE(passes.back()->finish());
      }
      EXPECT_TRUE(device->copy(copies, stream));
      checksums.push_back(device->checksums(ranges, stream).value());
    }
    *begins = true;
    EXPECT_TRUE(wait());
  };
  const auto round = [&] {
    save();
    EXPECT_TRUE(wait());  // a pool returns what it does not keep
  };
  const HostCudaCounts& counts = host_cuda_counts();
  for (int i = 0; i < 3; ++i) round();
  const std::uint64_t allocations = counts.driver_allocations, waits = counts.device_waits;
  for (int i = 0; i < 10; ++i) round();
  EXPECT_EQ(counts.driver_allocations, allocations);
  EXPECT_EQ(counts.device_waits, waits) << "freeing waits for all kernels";
  device->drop_stream(stream);
}

TEST(Flush, IsAskedForWhereArrivalsAreUnorderedAndTheHostCanFlush) {
  const auto flushes = [](int ordering, int options) {
    host_cuda_set_attribute(cudaDevAttrGPUDirectRDMAWritesOrdering, ordering);
    host_cuda_set_attribute(cudaDevAttrGPUDirectRDMAFlushWritesOptions, options);
    const std::uint64_t before = host_cuda_counts().flushes;
    const DeviceBytes memory(100);
    const DeviceCopy copy{memory.data(), memory.data() + 50, 50};
    EXPECT_TRUE(make_cuda_device(0).value()->copy(std::span(&copy, 1), nullptr));
    return host_cuda_counts().flushes - before;
  };
  EXPECT_EQ(flushes(cudaGPUDirectRDMAWritesOrderingNone, cudaFlushGPUDirectRDMAWritesOptionHost), 1U);
  EXPECT_EQ(flushes(cudaGPUDirectRDMAWritesOrderingNone, cudaFlushGPUDirectRDMAWritesOptionMemOps), 0U);
  EXPECT_EQ(flushes(cudaGPUDirectRDMAWritesOrderingOwner, cudaFlushGPUDirectRDMAWritesOptionHost), 0U);
}

}  // namespace
}  // namespace kvferry
