#include "transport/base/net/cluster_key.h"

#include <fcntl.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include "transport/base/check.h"
#include "transport/base/log.h"
#include "transport/base/net/without_signals.h"
#include "transport/base/owned_fd.h"

namespace kvferry::net {
namespace {

// A file with several keys begins with this line; each of the other lines is one key in hexadecimal.
constexpr std::string_view kListHead = "kvferry cluster keys 1\n";
constexpr std::size_t kFileBytesMax = kListHead.size() + ClusterKey::kKeysMax * (2 * ClusterKey::kBytesMax + 1);

/// Returns the file's bytes, at most one more than a key file may have, or nullopt after an error, which is in errno.
std::optional<std::string> read_some_of(int file) {
  std::string bytes(kFileBytesMax + 1, '\0');
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

Error unusable(const std::string& why) { return Error{ErrorCode::kInvalidArgument, why}; }

std::optional<std::string> bytes_of_hex(std::string_view hex) {
  const auto digit = [](char letter) {
    return letter >= '0' && letter <= '9' ? letter - '0' : letter >= 'a' && letter <= 'f' ? letter - 'a' + 10 : -1;
  };
  std::string bytes;
  for (std::size_t at = 0; at + 1 < hex.size(); at += 2) {
    const int high = digit(hex[at]), low = digit(hex[at + 1]);
    if (high < 0 || low < 0) return std::nullopt;
    bytes += static_cast<char>(high * 16 + low);
  }
  if (hex.size() % 2 != 0) return std::nullopt;
  return bytes;
}

Result<std::vector<std::string>> keys_of_file(const std::string& file) {
  const std::string content = KVFERRY_TRY(read_key_file(file));
  Result<std::vector<std::string>> keys = parse_cluster_keys(content);
  if (!keys) return unusable(fmt::format("cluster_key_file {} {}", file, keys.error().what));
  return keys;
}

}  // namespace

/// The keys of a file, or one key without a file.
class ClusterKey::Keys {
 public:
  explicit Keys(std::vector<std::string> keys, std::string file = {})
      : file_(std::move(file)), keys_(std::move(keys)), done_{keys_, {}}, seen_(done_) {
    if (has_file()) follower_ = start_without_signals([this] { follow(); });
  }
  ~Keys() {
    if (!has_file()) return;
    {
      const std::lock_guard lock(mutex_);
      is_over_ = true;
    }
    ending_.notify_one();
    follower_.join();
  }
  Keys(const Keys&) = delete;
  Keys& operator=(const Keys&) = delete;

  bool has_file() const { return !file_.empty(); }
  std::vector<std::string> all() const {
    const std::lock_guard lock(mutex_);
    return keys_;
  }
  std::string in_use() const {
    const std::lock_guard lock(mutex_);
    return keys_.front();
  }
  std::uint64_t version() const { return version_; }

 private:
  /// What one look at the file has found: its keys, or why it can't be used.
  struct Found {
    std::vector<std::string> keys;
    std::string trouble;
    bool operator==(const Found&) const = default;
  };

  void follow() {
    ::pthread_setname_np(::pthread_self(), "kvferry-key");
    std::unique_lock lock(mutex_);
    while (!ending_.wait_for(lock, std::chrono::nanoseconds(kLookEveryNs), [this] { return is_over_; })) {
      lock.unlock();  // a file on another host may take long
      look();
      lock.lock();
    }
  }

  void look() {
    Result<std::vector<std::string>> keys = keys_of_file(file_);
    Found found = keys ? Found{*std::move(keys), {}} : Found{{}, keys.error().what};
    const bool is_settled = found == seen_;
    seen_ = found;
    if (!is_settled || found == done_) return;
    done_ = std::move(found);
    if (!done_.trouble.empty()) return log().error("{}; the former keys stay in use", done_.trouble);
    {
      const std::lock_guard lock(mutex_);
      keys_ = done_.keys;
      ++version_;
    }
    log().info("cluster_key_file {}: {} accepted from now on", file_,
               done_.keys.size() == 1 ? "1 key is" : "2 keys are");
  }

  const std::string file_;
  mutable std::mutex mutex_;  // guards keys_ and is_over_
  std::condition_variable ending_;
  bool is_over_ = false;
  std::vector<std::string> keys_;
  std::atomic<std::uint64_t> version_{1};
  Found done_, seen_;  // what the log and keys_ tell, and what the last look has found; the thread's own
  std::thread follower_;
};

ClusterKey::ClusterKey(std::string bytes) : keys_(std::make_shared<Keys>(std::vector<std::string>{std::move(bytes)})) {}

bool operator==(const ClusterKey& a, const ClusterKey& b) {
  return a.keys_ == b.keys_ || a.keys_->in_use() == b.keys_->in_use();
}

bool ClusterKey::has_file() const { return keys_->has_file(); }
std::uint64_t ClusterKey::version() const { return keys_->version(); }

std::vector<ClusterKey> ClusterKey::accepted() const {
  std::vector<ClusterKey> keys;
  for (std::string& bytes : keys_->all()) keys.emplace_back(std::move(bytes));
  return keys;
}

ClusterKey::Derived ClusterKey::derived(std::string_view purpose) const {
  const std::string bytes = keys_->in_use();
  Derived key{};
  unsigned num_bytes = 0;
  const bool is_made =
      ::HMAC(::EVP_sha256(), bytes.data(), static_cast<int>(bytes.size()),
             reinterpret_cast<const unsigned char*>(purpose.data()), purpose.size(), key.data(), &num_bytes) != nullptr;
  KVFERRY_CHECK(is_made && num_bytes == key.size(), "HMAC-SHA256 failed");
  return key;
}

Result<std::vector<std::string>> parse_cluster_keys(std::string_view content) {
  std::vector<std::string> keys;
  if (content.starts_with(kListHead)) {
    for (content.remove_prefix(kListHead.size()); !content.empty();) {
      const std::size_t end = content.find('\n');
      std::optional<std::string> key = bytes_of_hex(content.substr(0, end));
      if (!key || end == std::string_view::npos)
        return unusable(fmt::format("has a list whose line {} is no key in hexadecimal", keys.size() + 2));
      keys.push_back(std::move(*key));
      content.remove_prefix(end + 1);
    }
    if (keys.size() != ClusterKey::kKeysMax || keys[0] == keys[1])
      return unusable(fmt::format("lists {} keys; allowed: two different ones", keys.size()));
  } else {
    keys.emplace_back(content);
  }
  for (const std::string& key : keys) {
    if (key.size() >= ClusterKey::kBytesMin && key.size() <= ClusterKey::kBytesMax) continue;
    const std::string size = key.size() > ClusterKey::kBytesMax ? "more than 65536" : std::to_string(key.size());
    return unusable(fmt::format("has {} bytes; allowed: 32 to 65536 (kvferry keygen makes one)", size));
  }
  return keys;
}

std::string format_cluster_keys(const std::vector<std::string>& keys) {
  if (keys.size() == 1) return keys.front();
  std::string content(kListHead);
  for (const std::string& key : keys) {
    for (const char byte : key) content += fmt::format("{:02x}", static_cast<std::uint8_t>(byte));
    content += '\n';
  }
  return content;
}

Result<std::string> read_key_file(const std::string& file) {
  const auto refused = [&](const std::string& why) {
    return unusable(fmt::format("cluster_key_file {} {}", file, why));
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
  if (bytes->size() > kFileBytesMax) return refused("has more than 65536 bytes; allowed: 32 to 65536");
  return std::move(*bytes);
}

Result<std::optional<ClusterKey>> read_cluster_key(const std::string& file) {
  if (file.empty()) return std::optional<ClusterKey>();
  std::vector<std::string> keys = KVFERRY_TRY(keys_of_file(file));
  return std::optional(ClusterKey(std::make_shared<ClusterKey::Keys>(std::move(keys), file)));
}

}  // namespace kvferry::net
