#include "transport/shared_memory.h"

#include <fcntl.h>
#include <linux/memfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <limits>
#include <sstream>
#include <utility>

#include "transport/base/memory/cgroup_memory.h"
#include "transport/base/memory/large_memory.h"

namespace kvferry {
namespace {

bool is_valid_label(std::string_view label) {
  constexpr std::string_view kAllowed = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.";
  return !label.empty() && label.size() <= 64 && label.find_first_not_of(kAllowed) == std::string_view::npos;
}

std::uint64_t available_on_the_machine() {
  std::ifstream file("/proc/meminfo");
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string key;
    std::uint64_t kib = 0;
    if (words >> key >> kib && key == "MemAvailable:") return kib << 10;
  }
  return std::numeric_limits<std::uint64_t>::max();
}

Error no_memory(std::string_view what, std::uint64_t bytes) {
  return Error{ErrorCode::kUnavailable,
               fmt::format("cannot {} {} bytes of shared memory: {}", what, bytes, std::strerror(errno))};
}

Error not_enough(std::uint64_t wanted_bytes, std::uint64_t available) {
  return Error{
      ErrorCode::kUnavailable,
      fmt::format("cannot get {} bytes of shared memory: {} bytes are free on this machine and within this container's "
                  "memory limit; free memory or, if the shared memory is for the pool, lower pool_bytes",
                  wanted_bytes, available)};
}

/// Allocates the pages, huge ones as far as the kernel can make them. Works in steps, so that a signal, which ends a
/// call early, affects one step only. Errors are ignored here, because reserve() reports them.
void populate(std::span<std::byte> memory) {
  make_huge_pages(memory);
  constexpr std::size_t kStepBytes = std::size_t{256} << 20;
  for (std::size_t done = 0; done < memory.size(); done += kStepBytes) {
    const std::span<std::byte> step = memory.subspan(done, std::min(kStepBytes, memory.size() - done));
    if (::madvise(step.data(), step.size(), MADV_POPULATE_WRITE) != 0 && errno != EINTR) return;
  }
}

int reserve(int fd, std::uint64_t bytes) {
  constexpr std::uint64_t kStepBytes = std::uint64_t{256} << 20;
  for (std::uint64_t done = 0; done < bytes;) {
    const std::uint64_t step_bytes = std::min(kStepBytes, bytes - done);
    const int code = ::posix_fallocate(fd, static_cast<off_t>(done), static_cast<off_t>(step_bytes));
    if (code == 0) done += step_bytes;
    if (code != 0 && code != EINTR) return code;
  }
  return 0;
}

}  // namespace

/// The limits of this process's cgroups count too, because the kernel kills a process that exceeds them.
std::uint64_t SharedMemory::available_bytes() { return std::min(available_on_the_machine(), bytes_left_in_cgroups()); }

Result<SharedMemory> SharedMemory::create(std::string_view label, std::uint64_t bytes) {
  if (!is_valid_label(label))
    return Error{
        ErrorCode::kInvalidArgument,
        fmt::format("'{}' is not a label for shared memory: 1 to 64 letters, digits, '_' or '.' are allowed", label)};
  if (bytes == 0 || bytes > static_cast<std::uint64_t>(std::numeric_limits<off_t>::max()))
    return Error{ErrorCode::kInvalidArgument,
                 fmt::format("cannot make shared memory of {} bytes; allowed: 1 to {} (setting pool_bytes)", bytes,
                             std::numeric_limits<off_t>::max())};
  const std::string name = fmt::format("kvferry-{}", label);
  if (bytes >= kHugePageBytes && bytes <= reserved_huge_page_bytes()) {
    // Another process may take the huge pages first; then ordinary pages are used.
    Result<SharedMemory> huge = create_of(name, bytes, MFD_HUGETLB | MFD_HUGE_2MB);
    if (huge) return huge;
  }
  if (const std::uint64_t available = available_bytes(); bytes > available) return not_enough(bytes, available);
  return create_of(name, bytes, 0);
}

Result<SharedMemory> SharedMemory::create_of(const std::string& name, std::uint64_t bytes, unsigned page_flags) {
  Result<SharedMapping> mapping = SharedMapping::create(name, bytes, page_flags);
  if (!mapping && mapping.error().code == ErrorCode::kFull) return not_enough(bytes, available_bytes());
  if (!mapping) return std::move(mapping).error();
  return SharedMemory(std::move(*mapping));
}

Result<SharedMemory> SharedMemory::open(const std::string& name) {
  OwnedFd fd(::open(name.c_str(), O_RDWR | O_CLOEXEC));
  struct stat stats {};
  if (!fd || ::fstat(fd.get(), &stats) != 0 || stats.st_size == 0)
    return Error{ErrorCode::kNotFound, fmt::format("cannot open shared memory {}: {}", name,
                                                   fd && stats.st_size == 0 ? "it is empty" : std::strerror(errno))};
  return SharedMemory(KVFERRY_TRY(SharedMapping::map(std::move(fd), 0, static_cast<std::uint64_t>(stats.st_size))));
}

std::string SharedMemory::name() const { return fmt::format("/proc/{}/fd/{}", ::getpid(), mapping_.fd()); }

namespace {

Result<OwnedFd> make_file(const std::string& name, std::uint64_t bytes, unsigned page_flags) {
  OwnedFd fd(::memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING | page_flags));
  const std::uint64_t file_bytes = page_flags == 0 ? bytes : whole_pages(fd.get(), bytes);
  if (!fd || ::ftruncate(fd.get(), static_cast<off_t>(file_bytes)) != 0 ||
      ::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0)
    return no_memory("make", bytes);
  return fd;
}

/// Gets the pages from the kernel now, because later a lack of memory would end the process that touches them.
Result<SharedMapping> with_pages(SharedMapping mapping) {
  populate(mapping.span());
  const int code = reserve(mapping.fd(), mapping.span().size());
  if (code == 0) return mapping;
  return Error{code == ENOSPC || code == ENOMEM ? ErrorCode::kFull : ErrorCode::kUnavailable,
               fmt::format("cannot reserve {} bytes of shared memory: {}", mapping.span().size(), std::strerror(code))};
}

}  // namespace

Result<SharedMapping> SharedMapping::create(const std::string& name, std::uint64_t bytes, unsigned page_flags) {
  OwnedFd fd = KVFERRY_TRY(make_file(name, bytes, page_flags));
  ::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SEAL);
  SharedMapping mapping = KVFERRY_TRY(map(std::move(fd), 0, bytes));
  return with_pages(std::move(mapping));
}

Result<SharedMapping> SharedMapping::create_for_readers(const std::string& name, std::uint64_t bytes) {
  OwnedFd fd = KVFERRY_TRY(make_file(name, bytes, 0));
  SharedMapping unreserved = KVFERRY_TRY(map(std::move(fd), 0, bytes));
  SharedMapping mapping = KVFERRY_TRY(with_pages(std::move(unreserved)));
  ::fcntl(mapping.fd(), F_ADD_SEALS, F_SEAL_FUTURE_WRITE);
  ::fcntl(mapping.fd(), F_ADD_SEALS, F_SEAL_SEAL);
  return mapping;
}

Result<SharedMapping> SharedMapping::map(OwnedFd fd, std::uint64_t offset, std::uint64_t bytes, bool is_writable) {
  const std::uint64_t mapped_bytes = whole_pages(fd.get(), bytes);
  void* memory = map_for_huge_pages(fd.get(), offset, mapped_bytes, PROT_READ | (is_writable ? PROT_WRITE : 0));
  if (memory == MAP_FAILED) return no_memory("map", bytes);
  ::madvise(memory, mapped_bytes, MADV_HUGEPAGE);  // the kernel may refuse this advice
  SharedMapping mapping;
  mapping.fd_ = std::move(fd);
  mapping.memory_ = {static_cast<std::byte*>(memory), Unmap{mapped_bytes}};
  mapping.bytes_ = bytes;
  return mapping;
}

void SharedMapping::Unmap::operator()(std::byte* memory) const { ::munmap(memory, bytes); }

}  // namespace kvferry
