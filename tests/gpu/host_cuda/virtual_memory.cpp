// The driver's virtual memory: physical memory by handles, and ranges of addresses to which it is mapped.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <iterator>

#include "tests/gpu/host_cuda/simulated.h"

namespace kvferry::host_cuda {
namespace {

constexpr std::size_t kGranularity = std::size_t{2} << 20;

/// Physical memory of cuMemCreate(), which is a file in memory here, so that other processes can map it.
struct Physical {
  int fd = -1;
  std::size_t bytes = 0;
  int device = 0, num_users = 0;
  bool is_exportable = false;
};
std::map<CUmemGenericAllocationHandle, Physical> physical;  // guarded by State::mutex
std::map<CUdeviceptr, std::pair<CUmemGenericAllocationHandle, std::size_t>> mapped;
std::map<CUdeviceptr, std::size_t> reserved;
CUmemGenericAllocationHandle last_handle = 0;

void drop_user(CUmemGenericAllocationHandle handle) {
  const auto found = physical.find(handle);
  if (--found->second.num_users > 0) return;
  ::close(found->second.fd);
  physical.erase(found);
}

CUresult granularity(std::size_t* bytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  return *bytes = kGranularity, CUDA_SUCCESS;
}
CUresult create(CUmemGenericAllocationHandle* handle, std::size_t bytes, const CUmemAllocationProp* properties,
                unsigned long long) {
  if (bytes == 0 || bytes % kGranularity != 0) return CUDA_ERROR_INVALID_VALUE;
  if (properties->requestedHandleTypes == CU_MEM_HANDLE_TYPE_FABRIC) return CUDA_ERROR_NOT_PERMITTED;
  const int fd = ::memfd_create("simulated GPU memory", MFD_CLOEXEC);
  if (fd < 0 || ::ftruncate(fd, static_cast<off_t>(bytes)) != 0) return CUDA_ERROR_OUT_OF_MEMORY;
  const std::lock_guard lock(state().mutex);
  *handle = ++last_handle;
  physical[*handle] = {fd, bytes, properties->location.id, 1,
                       properties->requestedHandleTypes == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR};
  return CUDA_SUCCESS;
}
CUresult release(CUmemGenericAllocationHandle handle) {
  const std::lock_guard lock(state().mutex);
  if (!physical.contains(handle)) return CUDA_ERROR_INVALID_VALUE;
  drop_user(handle);
  return CUDA_SUCCESS;
}
CUresult export_handle(void* fd, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType, unsigned long long) {
  const std::lock_guard lock(state().mutex);
  const auto found = physical.find(handle);
  if (found == physical.end() || !found->second.is_exportable) return CUDA_ERROR_INVALID_VALUE;
  const int copy = ::fcntl(found->second.fd, F_DUPFD_CLOEXEC, 0);
  std::memcpy(fd, &copy, sizeof(copy));
  return CUDA_SUCCESS;
}
CUresult import_handle(CUmemGenericAllocationHandle* handle, void* os_handle, CUmemAllocationHandleType) {
  const int fd = static_cast<int>(number_of(os_handle));
  const off_t bytes = ::lseek(fd, 0, SEEK_END);
  const int copy = ::fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (bytes <= 0 || copy < 0) return CUDA_ERROR_INVALID_VALUE;
  const std::lock_guard lock(state().mutex);
  *handle = ++last_handle;
  physical[*handle] = {copy, static_cast<std::size_t>(bytes), current_device(), 1, true};
  return CUDA_SUCCESS;
}
CUresult reserve(CUdeviceptr* address, std::size_t bytes, std::size_t, CUdeviceptr, unsigned long long) {
  void* const made = ::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (made == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  *address = number_of(made);
  const std::lock_guard lock(state().mutex);
  reserved[*address] = bytes;
  return CUDA_SUCCESS;
}
CUresult unreserve(CUdeviceptr address, std::size_t bytes) {
  const std::lock_guard lock(state().mutex);
  const auto found = reserved.find(address);
  if (found == reserved.end() || found->second != bytes) return CUDA_ERROR_INVALID_VALUE;
  reserved.erase(found);
  ::munmap(reinterpret_cast<void*>(address), bytes);
  return CUDA_SUCCESS;
}
CUresult map(CUdeviceptr address, std::size_t bytes, std::size_t offset, CUmemGenericAllocationHandle handle,
             unsigned long long) {
  const std::lock_guard lock(state().mutex);
  const auto found = physical.find(handle);
  if (found == physical.end() || offset != 0 || bytes != found->second.bytes) return CUDA_ERROR_INVALID_VALUE;
  void* const made = ::mmap(reinterpret_cast<void*>(address), bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
                            found->second.fd, 0);
  if (made == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  ++found->second.num_users;
  mapped[address] = {handle, bytes};
  state().allocations[address] = {bytes, found->second.device, Allocation::Origin::kVirtual, nullptr, nullptr};
  return CUDA_SUCCESS;
}
CUresult unmap(CUdeviceptr address, std::size_t bytes) {
  const std::lock_guard lock(state().mutex);
  const auto found = mapped.find(address);
  if (found == mapped.end() || found->second.second != bytes) return CUDA_ERROR_INVALID_VALUE;
  ::mmap(reinterpret_cast<void*>(address), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED,
         -1, 0);
  drop_user(found->second.first);
  mapped.erase(found);
  state().allocations.erase(address);
  return CUDA_SUCCESS;
}
CUresult set_access(CUdeviceptr, std::size_t, const CUmemAccessDesc*, std::size_t) { return CUDA_SUCCESS; }
CUresult retain(CUmemGenericAllocationHandle* handle, void* address) {
  const std::lock_guard lock(state().mutex);
  const auto after = mapped.upper_bound(number_of(address));
  if (after == mapped.begin()) return CUDA_ERROR_INVALID_VALUE;
  const auto& [base, what] = *std::prev(after);
  if (number_of(address) >= base + what.second) return CUDA_ERROR_INVALID_VALUE;
  ++physical.at(what.first).num_users;
  *handle = what.first;
  return CUDA_SUCCESS;
}

}  // namespace

std::size_t num_virtual_alive() { return physical.size() + reserved.size(); }

void* virtual_memory_function(const std::string& name) {
  static const std::map<std::string, void*> all = {
      {"cuMemGetAllocationGranularity", reinterpret_cast<void*>(&granularity)},
      {"cuMemCreate", reinterpret_cast<void*>(&create)},
      {"cuMemRelease", reinterpret_cast<void*>(&release)},
      {"cuMemExportToShareableHandle", reinterpret_cast<void*>(&export_handle)},
      {"cuMemImportFromShareableHandle", reinterpret_cast<void*>(&import_handle)},
      {"cuMemAddressReserve", reinterpret_cast<void*>(&reserve)},
      {"cuMemAddressFree", reinterpret_cast<void*>(&unreserve)},
      {"cuMemMap", reinterpret_cast<void*>(&map)},
      {"cuMemUnmap", reinterpret_cast<void*>(&unmap)},
      {"cuMemSetAccess", reinterpret_cast<void*>(&set_access)},
      {"cuMemRetainAllocationHandle", reinterpret_cast<void*>(&retain)},
  };
  const auto found = all.find(name);
  return found == all.end() ? nullptr : found->second;
}

}  // namespace kvferry::host_cuda
