// States what kvferry relies on in CUDA's memory: pools, IPC handles and virtual memory; see cuda_runtime_test.cpp.
#include <cuda.h>
#include <cuda_runtime.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>

#include "kernels/cuda/driver_api.h"
#include "tests/gpu/device_cache.h"

namespace kvferry {
namespace {

constexpr std::uint64_t kBytes = 1 << 20;

template <class Function>
Function driver(const char* name, unsigned since) {
  return reinterpret_cast<Function>(driver_function(name, since).value());
}

class CudaMemory : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = why_no_gpu(); !why.empty()) GTEST_SKIP() << "needs a GPU: " << why;
    cudaGetLastError();
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
  }
  void TearDown() override {
    if (stream_ == nullptr) return;
    EXPECT_EQ(cudaStreamDestroy(stream_), cudaSuccess);
    EXPECT_EQ(cudaGetLastError(), cudaSuccess) << "a test reads the errors that it causes";
  }
  /// Returns whether CUDA refuses to export the memory.
  static bool is_refused(void* memory) {
    cudaIpcMemHandle_t handle;
    const cudaError_t code = cudaIpcGetMemHandle(&handle, memory);
    if (code == cudaSuccess) return false;
    EXPECT_EQ(code, cudaErrorInvalidValue);
    EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
    return true;
  }
  static bool is_legacy_ipc_capable(void* memory) {
    const auto get = driver<decltype(&cuPointerGetAttribute)>("cuPointerGetAttribute", 4000);
    int is_capable = -1;
    EXPECT_EQ(get(&is_capable, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, address_of(memory)), CUDA_SUCCESS);
    return is_capable == 1;
  }
  struct Range {
    std::byte* base = nullptr;
    std::size_t bytes = 0;
    bool operator==(const Range&) const = default;
  };
  static Range range_of(void* memory) {
    const auto get = driver<decltype(&cuMemGetAddressRange)>("cuMemGetAddressRange", 3020);
    CUdeviceptr base = 0;
    std::size_t bytes = 0;
    if (get(&base, &bytes, address_of(memory)) != CUDA_SUCCESS) return {};
    return {reinterpret_cast<std::byte*>(base), bytes};
  }
  static CUdeviceptr address_of(void* memory) { return reinterpret_cast<std::uintptr_t>(memory); }

  cudaStream_t stream_ = nullptr;
};

std::uint64_t asked(cudaMemPool_t pool, cudaMemPoolAttr attribute) {
  std::uint64_t value = 0;
  EXPECT_EQ(cudaMemPoolGetAttribute(pool, attribute, &value), cudaSuccess);
  return value;
}

TEST_F(CudaMemory, TheDefaultPoolKeepsNothingOverASynchronisation) {
  cudaMemPool_t pool = nullptr;
  ASSERT_EQ(cudaDeviceGetDefaultMemPool(&pool, 0), cudaSuccess);
  EXPECT_EQ(asked(pool, cudaMemPoolAttrReleaseThreshold), 0U);
  void* memory = nullptr;
  ASSERT_EQ(cudaMallocAsync(&memory, kBytes, stream_), cudaSuccess);
  EXPECT_GE(asked(pool, cudaMemPoolAttrUsedMemCurrent), kBytes);
  ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  EXPECT_GE(asked(pool, cudaMemPoolAttrReservedMemCurrent), kBytes);
  ASSERT_EQ(cudaFreeAsync(memory, stream_), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  EXPECT_EQ(asked(pool, cudaMemPoolAttrUsedMemCurrent), 0U);
  EXPECT_EQ(asked(pool, cudaMemPoolAttrReservedMemCurrent), 0U);
}

TEST_F(CudaMemory, APoolKeepsWhatIsBelowItsThreshold) {
  cudaMemPoolProps properties{};
  properties.allocType = cudaMemAllocationTypePinned;
  properties.location.type = cudaMemLocationTypeDevice;
  properties.location.id = 0;
  cudaMemPool_t pool = nullptr;
  ASSERT_EQ(cudaMemPoolCreate(&pool, &properties), cudaSuccess);
  EXPECT_EQ(asked(pool, cudaMemPoolAttrReleaseThreshold), 0U);
  std::uint64_t everything = UINT64_MAX;
  ASSERT_EQ(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &everything), cudaSuccess);
  std::uint64_t reserved = 0;
  for (int round = 0; round < 3; ++round) {
    void* memory = nullptr;
    ASSERT_EQ(cudaMallocFromPoolAsync(&memory, kBytes, pool, stream_), cudaSuccess);
    if (round == 0) reserved = asked(pool, cudaMemPoolAttrReservedMemCurrent);
    EXPECT_GE(asked(pool, cudaMemPoolAttrUsedMemCurrent), kBytes);
    ASSERT_EQ(cudaFreeAsync(memory, stream_), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    EXPECT_EQ(asked(pool, cudaMemPoolAttrUsedMemCurrent), 0U);
    EXPECT_EQ(asked(pool, cudaMemPoolAttrReservedMemCurrent), reserved) << round;
  }
  EXPECT_GE(reserved, kBytes);
  EXPECT_EQ(cudaMemPoolDestroy(pool), cudaSuccess);
}

TEST_F(CudaMemory, HandlesAreMadeForCudaMallocAndForAnyPartOfIt) {
  void* memory = nullptr;
  ASSERT_EQ(cudaMalloc(&memory, 3 * kBytes), cudaSuccess);
  auto* const base = static_cast<std::byte*>(memory);
  EXPECT_FALSE(is_refused(base));
  EXPECT_FALSE(is_refused(base + 256));
  EXPECT_TRUE(is_legacy_ipc_capable(base));
  EXPECT_EQ(range_of(base + 100), (Range{base, 3 * kBytes})) << "the driver knows the whole allocation";

  void *small = nullptr, *next = nullptr;
  ASSERT_EQ(cudaMalloc(&small, 100), cudaSuccess);
  ASSERT_EQ(cudaMalloc(&next, 100), cudaSuccess);
  EXPECT_EQ(range_of(next), (Range{static_cast<std::byte*>(next), 100}));
  EXPECT_FALSE(is_refused(next));
  for (void* one : {memory, small, next}) EXPECT_EQ(cudaFree(one), cudaSuccess);
  EXPECT_EQ(range_of(memory), Range{}) << "freed";
}

TEST_F(CudaMemory, AHandleIsNotOpenedWhereItWasMade) {
  void *memory = nullptr, *opened = nullptr;
  ASSERT_EQ(cudaMalloc(&memory, kBytes), cudaSuccess);
  cudaIpcMemHandle_t handle;
  ASSERT_EQ(cudaIpcGetMemHandle(&handle, memory), cudaSuccess);
  EXPECT_EQ(cudaIpcOpenMemHandle(&opened, handle, cudaIpcMemLazyEnablePeerAccess), cudaErrorDeviceUninitialized);
  EXPECT_EQ(cudaGetLastError(), cudaErrorDeviceUninitialized);
  EXPECT_EQ(cudaFree(memory), cudaSuccess);
}

TEST_F(CudaMemory, NoHandleIsMadeForMemoryOfPools) {
  void* memory = nullptr;
  ASSERT_EQ(cudaMallocAsync(&memory, kBytes, stream_), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  EXPECT_TRUE(is_refused(memory));
  EXPECT_FALSE(is_legacy_ipc_capable(memory));
  EXPECT_EQ(range_of(memory), (Range{static_cast<std::byte*>(memory), kBytes}));
  EXPECT_EQ(cudaFreeAsync(memory, stream_), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
}

TEST_F(CudaMemory, NoHandleIsMadeForVirtualMemoryWhichIsExportedAsAFile) {
  const auto granularity_of = driver<decltype(&cuMemGetAllocationGranularity)>("cuMemGetAllocationGranularity", 10020);
  const auto create = driver<decltype(&cuMemCreate)>("cuMemCreate", 10020);
  const auto release = driver<decltype(&cuMemRelease)>("cuMemRelease", 10020);
  const auto reserve = driver<decltype(&cuMemAddressReserve)>("cuMemAddressReserve", 10020);
  const auto unreserve = driver<decltype(&cuMemAddressFree)>("cuMemAddressFree", 10020);
  const auto map = driver<decltype(&cuMemMap)>("cuMemMap", 10020);
  const auto unmap = driver<decltype(&cuMemUnmap)>("cuMemUnmap", 10020);
  const auto set_access = driver<decltype(&cuMemSetAccess)>("cuMemSetAccess", 10020);
  const auto export_handle = driver<decltype(&cuMemExportToShareableHandle)>("cuMemExportToShareableHandle", 10020);
  const auto retain = driver<decltype(&cuMemRetainAllocationHandle)>("cuMemRetainAllocationHandle", 11000);

  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = 0;
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  std::size_t grain = 0;
  CUmemGenericAllocationHandle handle = 0, retained = 0;
  CUdeviceptr address = 0;
  const CUmemAccessDesc access{properties.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  ASSERT_EQ(granularity_of(&grain, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM), CUDA_SUCCESS);
  EXPECT_EQ(create(&handle, grain - 1, &properties, 0), CUDA_ERROR_INVALID_VALUE);
  ASSERT_EQ(create(&handle, grain, &properties, 0), CUDA_SUCCESS);
  ASSERT_EQ(reserve(&address, 2 * grain, 0, 0, 0), CUDA_SUCCESS);
  ASSERT_EQ(map(address, grain, 0, handle, 0), CUDA_SUCCESS);
  ASSERT_EQ(set_access(address, grain, &access, 1), CUDA_SUCCESS);

  void* const memory = reinterpret_cast<void*>(address);
  EXPECT_TRUE(is_refused(memory));
  EXPECT_FALSE(is_legacy_ipc_capable(memory));
  EXPECT_EQ(range_of(memory), (Range{static_cast<std::byte*>(memory), grain})) << "what is mapped, not reserved";
  std::uint64_t written = 0x1234, read = 0;
  EXPECT_EQ(cudaMemcpy(memory, &written, sizeof written, cudaMemcpyDefault), cudaSuccess);
  EXPECT_EQ(cudaMemcpy(&read, memory, sizeof read, cudaMemcpyDefault), cudaSuccess);
  EXPECT_EQ(read, written);
  int fd = -1;
  EXPECT_EQ(retain(&retained, memory), CUDA_SUCCESS);
  EXPECT_EQ(export_handle(&fd, retained, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0), CUDA_SUCCESS);
  EXPECT_GE(fd, 0);
  ::close(fd);

  EXPECT_EQ(unmap(address, grain), CUDA_SUCCESS);
  EXPECT_EQ(unreserve(address, 2 * grain), CUDA_SUCCESS);
  EXPECT_EQ(release(retained), CUDA_SUCCESS);
  EXPECT_EQ(release(handle), CUDA_SUCCESS);
}

}  // namespace
}  // namespace kvferry
