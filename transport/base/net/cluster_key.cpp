#include "transport/base/net/cluster_key.h"

#include <fcntl.h>
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

#include "transport/base/log.h"
#include "transport/base/net/without_signals.h"
#include "transport/base/owned_fd.h"

namespace kvferry::net {
namespace {

// A file with several keys begins with this line; each of the other lines is one key in hexadecimal.
constexpr std::string_view kListHead = "kvferry cluster keys 1\n";
constexpr std::size_t kFileBytesMax = kListHead.size() + ClusterKey::kKeysMax * (2 * ClusterKey::kBytesMax + 1);

// Limit on the bytes of a list of members: each of up to 65536 members has a line of up to 266 bytes.
constexpr std::size_t kListBytesMax = std::size_t{20} << 20;

/// Returns the file's first bytes, all of them or more than `bytes_max`, or nullopt after an error, which is in errno.
std::optional<std::string> read_some_of(int file, std::size_t bytes_max) {
  constexpr std::size_t kBytesAtOnce = 64 << 10;  // the files are read again and again, and most are short
  std::string bytes;
  for (ssize_t got = 1; got != 0 && bytes.size() <= bytes_max;) {
    const std::size_t num_read = bytes.size();
    bytes.resize(num_read + kBytesAtOnce);
    got = ::read(file, bytes.data() + num_read, kBytesAtOnce);
    if (got < 0 && errno != EINTR) return std::nullopt;
    bytes.resize(num_read + (got > 0 ? static_cast<std::size_t>(got) : 0));
  }
  return bytes;
}

Error unusable(const std::string& why) { return Error{ErrorCode::kInvalidArgument, why}; }

Result<KeyContent> content_of_file(const std::string& file) {
  const std::string bytes = KVFERRY_TRY(read_key_file(file));
  const auto refused = [&](const Error& error) {
    return unusable(fmt::format("cluster_key_file {}: {}", file, error.what));
  };
  KeyContent content;
  content.members = KVFERRY_TRY(read_members(file));
  if (is_member_key(bytes)) {
    Result<MemberKey> own = parse_member_key(bytes);
    if (!own) return refused(own.error());
    content.own = *std::move(own);
    if (!content.members && content.own->identity.role >= Role::kWorker)
      return unusable(fmt::format("cluster_key_file {}: the key of {} needs the list of members, but {} is missing",
                                  file, content.own->identity.str(), members_file_of(file)));
    return content;
  }
  Result<std::vector<std::string>> keys = parse_cluster_keys(bytes);
  if (!keys) return refused(keys.error());
  content.keys = *std::move(keys);
  return content;
}

}  // namespace

/// What all copies of a ClusterKey share: the content of a file, read again and again, or one key without a file.
class ClusterKey::Keys {
 public:
  explicit Keys(KeyContent content, std::string file = {})
      : file_(std::move(file)), done_{std::move(content), {}}, seen_(done_) {
    take(done_.content);
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
  std::shared_ptr<const KeyContent> content() const {
    const std::lock_guard lock(mutex_);
    return content_;
  }
  std::optional<Identity> identity_of(std::string_view curve_key) const {
    const std::lock_guard lock(mutex_);
    if (!identities_) identities_ = content_->identities();
    const auto found = identities_->find(curve_key);
    return found == identities_->end() ? std::nullopt : std::optional(found->second);
  }
  std::uint64_t version() const { return version_; }

 private:
  /// What one look at the files has found: their content, or why they can't be used.
  struct Found {
    KeyContent content;
    std::string trouble;
    bool operator==(const Found&) const = default;
  };

  void follow() {
    ::pthread_setname_np(::pthread_self(), "kvferry-key");
    std::unique_lock lock(mutex_);
    while (!ending_.wait_for(lock, std::chrono::nanoseconds(kLookEveryNs), [this] { return is_over_; })) {
      lock.unlock();  // reading from a network file system may take long
      look();
      lock.lock();
    }
  }

  void look() {
    Result<KeyContent> content = content_of_file(file_);
    Found found = content ? Found{*std::move(content), {}} : Found{{}, content.error().what};
    if (found.trouble.empty() && !found.content.members && this->content()->members)
      found = {{}, fmt::format("the list of members {} is missing", members_file_of(file_))};
    const bool is_settled = found == seen_;
    seen_ = found;
    if (!is_settled || found == done_) return;
    done_ = std::move(found);
    if (!done_.trouble.empty()) return log().error("{}; the former keys stay in use", done_.trouble);
    take(done_.content);
    const std::size_t num_keys = done_.content.own ? done_.content.own->shared.size() : done_.content.keys.size();
    log().info("cluster_key_file {}: {} accepted from now on{}", file_, num_keys == 1 ? "1 key is" : "2 keys are",
               done_.content.members ? fmt::format("; members: {}", done_.content.members->size()) : "");
  }

  void take(const KeyContent& content) {
    const std::lock_guard lock(mutex_);
    content_ = std::make_shared<const KeyContent>(content);
    identities_.reset();
    ++version_;
  }

  const std::string file_;
  mutable std::mutex mutex_;  // guards content_, identities_ and is_over_
  std::condition_variable ending_;
  bool is_over_ = false;
  std::shared_ptr<const KeyContent> content_;
  mutable std::optional<std::map<std::string, Identity, std::less<>>> identities_;  // made from content_ when needed
  std::atomic<std::uint64_t> version_{0};
  Found done_, seen_;  // the read that was last used or logged, and the last read; only follower_ accesses both
  std::thread follower_;
};

std::vector<std::string> KeyContent::node_secrets() const {
  if (!own && !members) return keys;
  std::vector<std::string> secrets;
  for (const MemberKey::Shared& one : own ? own->shared : shared_with(Role::kWorker, keys))
    secrets.emplace_back(text_of(one.secret));
  return secrets;
}

Bytes32 KeyContent::own_certificate() const {
  return own ? own->certificate_secret() : certificate_secret(keys.front());
}

std::vector<std::string> KeyContent::node_certificates() const {
  std::vector<std::string> all;
  for (const Member& member : members.value_or(std::vector<Member>{}))
    if (member.identity.role >= Role::kWorker) all.emplace_back(text_of(member.certificate));
  for (const MemberKey::Shared& one : own ? own->shared : shared_with(Role::kNone, keys))
    all.emplace_back(text_of(one.certificate));
  return all;
}

std::map<std::string, Identity, std::less<>> KeyContent::identities() const {
  std::map<std::string, Identity, std::less<>> all;
  for (const Member& member : members.value_or(std::vector<Member>{}))
    all.emplace(hex_of(text_of(member.curve)), member.identity);
  for (const MemberKey::Shared& one : own ? own->shared : shared_with(Role::kNone, keys))
    all.emplace(hex_of(text_of(one.controller)), Identity{});
  return all;
}

ClusterKey::ClusterKey(std::string bytes) : keys_(std::make_shared<Keys>(KeyContent{.keys = {std::move(bytes)}})) {}

bool operator==(const ClusterKey& a, const ClusterKey& b) {
  if (a.keys_ == b.keys_) return true;
  const auto one = a.content(), other = b.content();
  return one->node_secrets().front() == other->node_secrets().front() && one->own == other->own;
}

bool ClusterKey::has_file() const { return keys_->has_file(); }
std::uint64_t ClusterKey::version() const { return keys_->version(); }
std::shared_ptr<const KeyContent> ClusterKey::content() const { return keys_->content(); }

std::vector<ClusterKey> ClusterKey::accepted() const {
  std::vector<ClusterKey> keys;
  for (const std::string& bytes : content()->keys) keys.emplace_back(bytes);
  return keys;
}

std::vector<ClusterKey> ClusterKey::accepted_by_nodes() const {
  std::vector<ClusterKey> keys;
  for (std::string& bytes : content()->node_secrets()) keys.emplace_back(std::move(bytes));
  return keys;
}

std::optional<Identity> ClusterKey::identity_of(std::string_view curve_key) const {
  return keys_->identity_of(curve_key);
}

Identity ClusterKey::own_identity() const {
  const auto now = content();
  return now->own ? now->own->identity : Identity{};
}

ClusterKey::Derived ClusterKey::derived(std::string_view purpose) const {
  const auto now = content();
  return derive(now->own ? text_of(now->own->shared.front().secret) : std::string_view(now->keys.front()), purpose);
}

Result<std::vector<std::string>> parse_cluster_keys(std::string_view content) {
  std::vector<std::string> keys;
  if (content.starts_with(kListHead)) {
    for (content.remove_prefix(kListHead.size()); !content.empty();) {
      const std::size_t end = content.find('\n');
      std::optional<std::string> key = bytes_of_hex(content.substr(0, end));
      if (!key || end == std::string_view::npos)
        return unusable(fmt::format("the key list's line {} is no key in hexadecimal (0-9, a-f) ended by a line break",
                                    keys.size() + 2));
      keys.push_back(std::move(*key));
      content.remove_prefix(end + 1);
    }
    if (keys.size() != ClusterKey::kKeysMax || keys[0] == keys[1])
      return unusable(fmt::format("the file lists {} keys; allowed: two different ones", keys.size()));
  } else {
    keys.emplace_back(content);
  }
  for (const std::string& key : keys) {
    if (key.size() >= ClusterKey::kBytesMin && key.size() <= ClusterKey::kBytesMax) continue;
    const std::string size = key.size() > ClusterKey::kBytesMax ? "more than 65536" : std::to_string(key.size());
    return unusable(fmt::format("the key has {} bytes; allowed: 32 to 65536 (kvferry keygen makes one)", size));
  }
  return keys;
}

std::string format_cluster_keys(const std::vector<std::string>& keys) {
  if (keys.size() == 1) return keys.front();
  std::string content(kListHead);
  for (const std::string& key : keys) content += hex_of(key) + '\n';
  return content;
}

Result<std::string> read_key_file(const std::string& file) {
  const auto refused = [&](const std::string& why) {
    return unusable(fmt::format("cluster_key_file {}: {}", file, why));
  };
  const auto unreadable = [&] { return refused("the file can't be read: " + std::generic_category().message(errno)); };
  const OwnedFd opened(::open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat about {};
  if (!opened || ::fstat(opened.get(), &about) != 0) return unreadable();
  if (!S_ISREG(about.st_mode)) return refused("this is not a regular file");
  const unsigned mode = about.st_mode & 07777U;
  if (mode != 0600 && mode != 0400)
    return refused(
        fmt::format("the file has mode {:04o}; allowed: 0600 and 0400, so that only its owner reads it", mode));
  std::optional<std::string> bytes = read_some_of(opened.get(), kFileBytesMax);
  if (!bytes) return unreadable();
  if (bytes->size() > kFileBytesMax) return refused("the file exceeds 256 KiB; allowed: 2 keys of up to 65536 bytes");
  return std::move(*bytes);
}

Result<std::optional<std::vector<Member>>> read_members(const std::string& key_file) {
  const std::string file = members_file_of(key_file);
  const auto refused = [&](const std::string& why) {
    return unusable(fmt::format("the list of members {}: {}", file, why));
  };
  const OwnedFd opened(::open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!opened && errno == ENOENT) return std::optional<std::vector<Member>>();
  struct stat about {};
  std::optional<std::string> bytes;
  if (opened && ::fstat(opened.get(), &about) == 0) bytes = read_some_of(opened.get(), kListBytesMax);
  if (!bytes) return refused("the file can't be read: " + std::generic_category().message(errno));
  if (bytes->size() > kListBytesMax) return refused("the file exceeds 20 MiB, which no list of members needs");
  if ((about.st_mode & 022U) != 0)
    return refused(fmt::format("the file has mode {:04o}; only its owner may write it (0644)", about.st_mode & 07777U));
  Result<std::vector<Member>> members = parse_members(*bytes);
  if (!members) return refused(members.error().what);
  return std::optional(*std::move(members));
}

Result<std::optional<ClusterKey>> read_cluster_key(const std::string& file) {
  if (file.empty()) return std::optional<ClusterKey>();
  KeyContent content = KVFERRY_TRY(content_of_file(file));
  return std::optional(ClusterKey(std::make_shared<ClusterKey::Keys>(std::move(content), file)));
}

}  // namespace kvferry::net
