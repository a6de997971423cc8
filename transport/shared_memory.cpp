#include "transport/shared_memory.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <limits>
#include <random>
#include <system_error>
#include <utility>

#include "transport/base/log.h"
#include "transport/base/owned_fd.h"

namespace kvferry {
namespace {

constexpr const char* kDirectory = "/dev/shm";
constexpr std::string_view kPrefix = "kvferry-";

bool is_valid_label(std::string_view label) {
  constexpr std::string_view kAllowed = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.";
  return !label.empty() && label.size() <= 64 && label.find_first_not_of(kAllowed) == std::string_view::npos;
}

std::string system_error_text() { return std::strerror(errno); }

Error no_space(std::uint64_t wanted_bytes, std::uint64_t free_bytes) {
  return Error{
      ErrorCode::kUnavailable,
      fmt::format(
          "pool_bytes asks for {} bytes of shared memory but {} has only {} bytes free; lower pool_bytes or enlarge {}",
          wanted_bytes, kDirectory, free_bytes, kDirectory)};
}

std::uint64_t free_bytes() {
  struct statvfs stats {};
  if (::statvfs(kDirectory, &stats) != 0) return 0;
  return static_cast<std::uint64_t>(stats.f_bavail) * stats.f_frsize;
}

void remove_segments_of_the_dead() {
  std::error_code failure;
  for (const auto& entry : std::filesystem::directory_iterator(kDirectory, failure)) {
    const std::string file = entry.path().filename().string();
    if (!file.starts_with(kPrefix)) continue;
    const OwnedFd fd(::shm_open(("/" + file).c_str(), O_RDWR | O_CLOEXEC, 0));
    if (fd.get() < 0 || ::flock(fd.get(), LOCK_EX | LOCK_NB) != 0) continue;  // another user's, gone, or alive
    if (::shm_unlink(("/" + file).c_str()) == 0) log().info("removed shared memory {} of a dead process", file);
  }
}

/// A fresh segment whose lock we hold. A cleaner may unlink a name between its creation and its lock: then try another.
Result<std::pair<std::string, int>> create_locked(std::string_view label) {
  std::random_device random;
  for (int attempt = 0; attempt < 16; ++attempt) {
    const std::string name = fmt::format("/{}{}-{}-{:08x}", kPrefix, label, ::getpid(), random());
    OwnedFd fd(::shm_open(name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
    if (fd.get() < 0 && errno == EEXIST) continue;
    if (fd.get() < 0)
      return Error{ErrorCode::kUnavailable,
                   fmt::format("cannot create shared memory {}: {}", name, system_error_text())};
    struct stat stats {};
    if (::flock(fd.get(), LOCK_EX) == 0 && ::fstat(fd.get(), &stats) == 0 && stats.st_nlink > 0)
      return std::pair{name, fd.release()};
  }
  return Error{ErrorCode::kUnavailable, fmt::format("cannot create a segment in {}: every name was taken", kDirectory)};
}

/// Writes nothing but takes the pages, huge ones where the mapping's advice is followed: fallocate() takes small ones.
/// Whatever fails here is found out by reserve().
void populate(std::span<std::byte> memory) {
  constexpr std::size_t kStepBytes = std::size_t{256} << 20;
  for (std::size_t done = 0; done < memory.size(); done += kStepBytes) {
    const std::span<std::byte> step = memory.subspan(done, std::min(kStepBytes, memory.size() - done));
    if (::madvise(step.data(), step.size(), MADV_POPULATE_WRITE) != 0 && errno != EINTR) return;
  }
}

/// In steps, because a signal interrupts the call and it would start from the beginning.
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

Result<std::byte*> map(int fd, std::uint64_t bytes, const std::string& name) {
  void* data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (data != MAP_FAILED) ::madvise(data, bytes, MADV_HUGEPAGE);  // a wish; refused where the system has none
  if (data == MAP_FAILED)
    return Error{ErrorCode::kUnavailable,
                 fmt::format("cannot map {} bytes of shared memory {}: {}", bytes, name, system_error_text())};
  return static_cast<std::byte*>(data);
}

}  // namespace

Result<SharedMemory> SharedMemory::create(std::string_view label, std::uint64_t bytes) {
  if (!is_valid_label(label))
    return Error{ErrorCode::kInvalidArgument,
                 fmt::format("bad shared memory label '{}': 1 to 64 letters, digits, '_' or '.' are allowed", label)};
  if (bytes == 0 || bytes > static_cast<std::uint64_t>(std::numeric_limits<off_t>::max()))
    return Error{ErrorCode::kInvalidArgument,
                 fmt::format("pool_bytes is {}: at least 1 and at most {} bytes are allowed", bytes,
                             std::numeric_limits<off_t>::max())};
  remove_segments_of_the_dead();
  if (const std::uint64_t free = free_bytes(); bytes > free) return no_space(bytes, free);

  auto created = create_locked(label);
  if (!created) return std::move(created).error();
  SharedMemory memory;  // from here on its destructor cleans up
  memory.name_ = created->first;
  memory.fd_ = created->second;
  memory.is_creator_ = true;
  if (::ftruncate(memory.fd_, static_cast<off_t>(bytes)) != 0)
    return Error{ErrorCode::kUnavailable,
                 fmt::format("cannot size shared memory {}: {}", memory.name_, system_error_text())};
  Result<std::byte*> data = map(memory.fd_, bytes, memory.name_);
  if (!data) return std::move(data).error();
  memory.data_ = *data;
  memory.bytes_ = bytes;
  populate(memory.span());
  if (const int code = reserve(memory.fd_, bytes); code != 0) {
    if (code == ENOSPC) {
      if (::ftruncate(memory.fd_, 0) != 0) log().warn("cannot give back {}: {}", memory.name_, system_error_text());
      return no_space(bytes, free_bytes());
    }
    return Error{ErrorCode::kUnavailable,
                 fmt::format("cannot reserve pool_bytes = {} bytes of shared memory: {}", bytes, std::strerror(code))};
  }
  return memory;
}

Result<SharedMemory> SharedMemory::open(const std::string& name) {
  OwnedFd fd(::shm_open(name.c_str(), O_RDWR | O_CLOEXEC, 0));
  struct stat stats {};
  if (fd.get() < 0 || ::fstat(fd.get(), &stats) != 0)
    return Error{ErrorCode::kNotFound, fmt::format("cannot open shared memory {}: {}", name, system_error_text())};
  if (stats.st_size == 0)
    return Error{ErrorCode::kNotFound, fmt::format("shared memory {} is empty: its creator has not finished it", name)};
  SharedMemory memory;
  Result<std::byte*> data = map(fd.get(), static_cast<std::uint64_t>(stats.st_size), name);
  if (!data) return std::move(data).error();
  memory.name_ = name;
  memory.data_ = *data;
  memory.bytes_ = static_cast<std::uint64_t>(stats.st_size);
  memory.fd_ = fd.release();
  return memory;
}

SharedMemory::SharedMemory(SharedMemory&& other) noexcept
    : name_(std::exchange(other.name_, {})),
      data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      fd_(std::exchange(other.fd_, -1)),
      is_creator_(std::exchange(other.is_creator_, false)) {}

SharedMemory& SharedMemory::operator=(SharedMemory&& other) noexcept {
  SharedMemory taken(std::move(other));
  std::swap(name_, taken.name_);
  std::swap(data_, taken.data_);
  std::swap(bytes_, taken.bytes_);
  std::swap(fd_, taken.fd_);
  std::swap(is_creator_, taken.is_creator_);
  return *this;
}

SharedMemory::~SharedMemory() {
  if (data_ != nullptr) ::munmap(data_, bytes_);
  if (fd_ < 0) return;
  if (is_creator_) ::shm_unlink(name_.c_str());
  ::close(fd_);
}

}  // namespace kvferry
