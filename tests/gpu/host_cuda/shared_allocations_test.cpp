// Tests how handles of other processes are opened and counted. Here the test itself acts as the other process and
// counts too.
#include "kernels/cuda/shared_allocations.h"

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include "tests/gpu/host_cuda/host_cuda.h"

namespace kvferry {
namespace {

/// Returns the export as if another process had made it. The number of the exporting process follows the header of the
/// array and a type.
std::string from_elsewhere(std::string exported) {
  exported[4] = static_cast<char>(exported[4] ^ 1);
  return exported;
}

TEST(SharedAllocations, OneIsOpenedOnceAndClosedWithItsLastRegion) {
  const ActsAsOtherProcess other;
  // this memory does not come from CUDA
  std::byte* const memory = host_gpu().allocate(MemoryKind::kDevice, 64).value();
  SharedAllocations shared;
  EXPECT_EQ(shared.export_memory({memory, 64}).error().code, ErrorCode::kUnavailable);
  host_gpu().release(MemoryKind::kDevice, memory);

  void* allocated = nullptr;
  ASSERT_EQ(cudaMalloc(&allocated, 1000), cudaSuccess);
  std::byte* const base = static_cast<std::byte*>(allocated);
  const std::string whole = shared.export_memory({base, 1000}).value(),
                    part = shared.export_memory({base + 500, 100}).value();
  EXPECT_EQ(shared.open(part, 100).value(), base + 500);
  EXPECT_EQ(host_gpu_opened(), 0) << "a process's own needs no opening";
  shared.close(base + 500);

  EXPECT_EQ(shared.open(from_elsewhere(whole), 1000).value(), base);
  EXPECT_EQ(shared.open(from_elsewhere(part), 500).value(), base + 500);
  EXPECT_EQ(shared.open(from_elsewhere(part), 500).value(), base + 500);
  EXPECT_EQ(host_gpu_opened(), 1);
  shared.close(base + 500);
  shared.close(base);
  EXPECT_EQ(host_gpu_opened(), 1);
  shared.close(base + 500);
  EXPECT_EQ(host_gpu_opened(), 0);
  shared.close(base);  // closes the address as if it were memory of this process
  EXPECT_EQ(host_gpu_opened(), 0);
  for (const std::string& exported : {part, from_elsewhere(part)})
    EXPECT_EQ(shared.open(exported, 501).error().code, ErrorCode::kCorrupt) << "beyond the allocation";
  EXPECT_EQ(SharedAllocations().open(part, 100).error().code, ErrorCode::kCorrupt) << "nobody exported it here";
  EXPECT_EQ(host_gpu_opened(), 0);
  cudaFree(allocated);
}

TEST(SharedAllocations, MemoryWithoutAHandleIsNamed) {
  void* pooled = nullptr;
  ASSERT_EQ(cudaMallocAsync(&pooled, 1000, nullptr), cudaSuccess);
  const Result<std::string> exported = SharedAllocations().export_memory({static_cast<std::byte*>(pooled), 1000});
  ASSERT_FALSE(exported);
  EXPECT_EQ(exported.error().code, ErrorCode::kUnavailable);
  EXPECT_NE(exported.error().what.find("is not from cudaMalloc() but from a memory pool or cuMemCreate()"),
            std::string::npos)
      << exported.error().what;
  cudaFreeAsync(pooled, nullptr);
  cudaStreamSynchronize(nullptr);
}

}  // namespace
}  // namespace kvferry
