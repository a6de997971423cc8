#include "transport/base/net/cluster_key.h"

#include <fcntl.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "transport/base/check.h"
#include "transport/base/owned_fd.h"

namespace kvferry::net {
namespace {

/// Returns the file's bytes, at most one more than a key may have, or nullopt after an error, which is in errno.
std::optional<std::string> read_some_of(int file) {
  std::string bytes(ClusterKey::kBytesMax + 1, '\0');
  std::size_t num_read = 0;
  while (num_read < bytes.size()) {
    const ssize_t got = ::read(file, bytes.data() + num_read, bytes.size() - num_read);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return std::nullopt;
    if (got == 0) break;
    num_read += static_cast<std::size_t>(got);
  }
  bytes.resize(num_read);
  return bytes;
}

}  // namespace

ClusterKey::Derived ClusterKey::derived(std::string_view purpose) const {
  Derived key{};
  unsigned num_bytes = 0;
  const bool is_made =
      ::HMAC(::EVP_sha256(), bytes_.data(), static_cast<int>(bytes_.size()),
             reinterpret_cast<const unsigned char*>(purpose.data()), purpose.size(), key.data(), &num_bytes) != nullptr;
  KVFERRY_CHECK(is_made && num_bytes == key.size(), "HMAC-SHA256 failed");
  return key;
}

Result<std::optional<ClusterKey>> read_cluster_key(const std::string& file) {
  if (file.empty()) return std::optional<ClusterKey>();
  const auto refused = [&](const std::string& why) {
    return Error{ErrorCode::kInvalidArgument, fmt::format("cluster_key_file {} {}", file, why)};
  };
  const auto unreadable = [&] { return refused("can't be read: " + std::generic_category().message(errno)); };
  const OwnedFd opened(::open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat about {};
  if (!opened || ::fstat(opened.get(), &about) != 0) return unreadable();
  if (!S_ISREG(about.st_mode)) return refused("is not a file");
  const unsigned mode = about.st_mode & 07777U;
  if (mode != 0600 && mode != 0400)
    return refused(fmt::format("has mode {:04o}; allowed: 0600 and 0400, so that only its owner reads it", mode));
  std::optional<std::string> bytes = read_some_of(opened.get());
  if (!bytes) return unreadable();
  if (bytes->size() < ClusterKey::kBytesMin || bytes->size() > ClusterKey::kBytesMax) {
    const std::string size = bytes->size() > ClusterKey::kBytesMax ? "more than 65536" : std::to_string(bytes->size());
    return refused(fmt::format("has {} bytes; allowed: 32 to 65536 (kvferry keygen makes one)", size));
  }
  return std::optional(ClusterKey(std::move(*bytes)));
}

}  // namespace kvferry::net
