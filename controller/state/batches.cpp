#include "controller/state/batches.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <bit>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <optional>

#include "transport/base/check.h"
#include "transport/base/checksum.h"
#include "transport/base/owned_fd.h"

namespace kvferry::controller {
namespace {

static_assert(std::endian::native == std::endian::little);
constexpr std::uint32_t kMagic = 0x4c46564b;  // "KVFL"

struct Head {
  std::uint64_t checksum = 0;
  std::uint32_t magic = kMagic;
  std::uint32_t length = 0;
};
static_assert(sizeof(Head) == kBatchHeadBytes);

/// Returns the checksum of a batch, computed over everything after its checksum field.
std::uint64_t checksum_of(std::string_view batch) {
  return chunk_checksum(std::as_bytes(std::span(batch).subspan(sizeof(Head::checksum))));
}

/// Returns the body of the batch at the front of `bytes`, or nullopt if that batch is bad.
std::optional<std::string_view> body_at(std::string_view bytes) {
  Head head;
  if (bytes.size() < sizeof head) return std::nullopt;
  std::memcpy(&head, bytes.data(), sizeof head);
  if (head.magic != kMagic || head.length > kBatchBodyBytesMax || head.length > bytes.size() - sizeof head)
    return std::nullopt;
  const std::string_view batch = bytes.substr(0, sizeof head + head.length);
  if (checksum_of(batch) != head.checksum) return std::nullopt;
  return batch.substr(sizeof head);
}

bool has_good_batch(std::string_view bytes) {
  const std::string_view magic(reinterpret_cast<const char*>(&kMagic), sizeof kMagic);
  for (std::size_t at = bytes.find(magic); at != std::string_view::npos; at = bytes.find(magic, at + 1)) {
    if (at >= sizeof(Head::checksum) && body_at(bytes.substr(at - sizeof(Head::checksum)))) return true;
  }
  return false;
}

}  // namespace

void end_batch(std::string& batch) {
  KVFERRY_CHECK(batch.size() - sizeof(Head) <= kBatchBodyBytesMax,
                "a batch of changes for the state folder has {} bytes; at most {} can be read back",
                batch.size() - sizeof(Head), kBatchBodyBytesMax);
  Head head{.length = static_cast<std::uint32_t>(batch.size() - sizeof(Head))};
  std::memcpy(batch.data(), &head, sizeof head);
  head.checksum = checksum_of(batch);
  std::memcpy(batch.data(), &head, sizeof head);
}

BatchScan scan_batches(std::string_view file, const std::function<bool(std::string_view)>& see) {
  BatchScan scan;
  while (scan.good_bytes < file.size()) {
    const std::optional<std::string_view> body = body_at(file.substr(scan.good_bytes));
    if (!body) {
      const bool is_torn = !has_good_batch(file.substr(scan.good_bytes));
      scan.end = is_torn ? BatchScan::End::kTorn : BatchScan::End::kCorrupt;
      break;
    }
    if (!see(*body)) {
      scan.end = BatchScan::End::kCorrupt;
      break;
    }
    scan.good_bytes += kBatchHeadBytes + body->size();
  }
  return scan;
}

Result<MappedFile> MappedFile::open(const std::string& path) {
  const OwnedFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  struct stat about {};
  if (!fd || ::fstat(fd.get(), &about) != 0) {
    return Error{errno == ENOENT ? ErrorCode::kNotFound : ErrorCode::kUnavailable,
                 fmt::format("{} cannot be read: {}", path, std::strerror(errno))};
  }
  MappedFile file;
  if (about.st_size == 0) return file;
  const auto size_bytes = static_cast<std::size_t>(about.st_size);
  void* data = ::mmap(nullptr, size_bytes, PROT_READ, MAP_PRIVATE | MAP_POPULATE, fd.get(), 0);
  if (data == MAP_FAILED)
    return Error{ErrorCode::kUnavailable, fmt::format("{} cannot be read: {}", path, std::strerror(errno))};
  file.bytes_ = {static_cast<const char*>(data), size_bytes};
  return file;
}

MappedFile::~MappedFile() {
  if (!bytes_.empty()) ::munmap(const_cast<char*>(bytes_.data()), bytes_.size());
}

}  // namespace kvferry::controller
