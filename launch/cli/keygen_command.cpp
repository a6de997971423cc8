// The command `kvferry keygen`.
#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <system_error>
#include <utility>
#include <vector>

#include "launch/cli/commands.h"
#include "transport/base/net/cluster_key.h"
#include "transport/base/owned_fd.h"

namespace kvferry::cli {
namespace {

constexpr std::size_t kKeyBytes = 32;

Error failed(const std::string& what, int error_number) {
  return Error{ErrorCode::kUnavailable, fmt::format("{}: {}", what, std::generic_category().message(error_number))};
}

Result<std::string> new_key() {
  std::array<std::uint8_t, kKeyBytes> key{};
  if (getrandom(key.data(), key.size(), 0) != static_cast<ssize_t>(key.size()))
    return failed("the system gives no random bytes", errno);
  return fmt::format("{:02x}\n", fmt::join(key, ""));
}

/// Creates a file that only its owner can read, the owner of `like` if that is given.
Result<void> create(const std::string& path, const std::string& text, const struct stat* like) {
  const OwnedFd file(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!file && errno == EEXIST)
    return Error{ErrorCode::kInvalidArgument, fmt::format("{} exists; a key is never overwritten", path)};
  if (!file) return failed(fmt::format("can't create {}", path), errno);
  errno = ENOSPC;  // the reason to report if write() writes less without setting errno
  const ssize_t written = ::write(file.get(), text.data(), text.size());
  const bool is_owned = like == nullptr || (::fchown(file.get(), like->st_uid, like->st_gid) == 0 &&
                                            ::fchmod(file.get(), like->st_mode & 07777U) == 0);
  if (written == static_cast<ssize_t>(text.size()) && is_owned && ::fsync(file.get()) == 0) return {};
  const int error_number = errno;
  ::unlink(path.c_str());
  return failed(fmt::format("can't write {}", path), error_number);
}

enum class Step { kAdd, kSwitch, kRetire };

Result<std::vector<std::string>> keys_after(Step step, std::vector<std::string> keys, const std::string& path) {
  const bool is_rotating = keys.size() > 1;
  if (step == Step::kAdd && is_rotating)
    return Error{ErrorCode::kInvalidArgument,
                 fmt::format("{} has two keys; end that rotation before with --retire", path)};
  if (step != Step::kAdd && !is_rotating)
    return Error{ErrorCode::kInvalidArgument, fmt::format("{} has one key; --add adds the next one", path)};
  if (step == Step::kAdd) keys.push_back(KVFERRY_TRY(new_key()));
  if (step == Step::kSwitch) std::swap(keys[0], keys[1]);
  if (step == Step::kRetire) keys.pop_back();
  return keys;
}

/// Replaces the file at once, so that its readers see the former content or the new one.
Result<void> rotate(Step step, const std::string& name) {
  const std::string content = KVFERRY_TRY(net::read_key_file(name));
  Result<std::vector<std::string>> keys = net::parse_cluster_keys(content);
  if (!keys) return std::move(keys).error().with(name);
  const std::vector<std::string> after = KVFERRY_TRY(keys_after(step, *std::move(keys), name));
  std::error_code error;
  const std::string path = std::filesystem::canonical(name, error).string();  // a symbolic link stays one
  struct stat like {};
  if (error || ::stat(path.c_str(), &like) != 0) return failed(fmt::format("can't read {}", name), errno);
  const std::string written = fmt::format("{}.{}", path, ::getpid());
  KVFERRY_TRY(create(written, net::format_cluster_keys(after), &like));
  if (::rename(written.c_str(), path.c_str()) == 0) return {};
  const int error_number = errno;
  ::unlink(written.c_str());
  return failed(fmt::format("can't replace {}", path), error_number);
}

}  // namespace

Run add_keygen_command(CLI::App& app) {
  CLI::App* const command = app.add_subcommand(
      "keygen",
      "Write a new cluster key to a file that only its owner can read, for cluster_key_file, or take one of the three "
      "steps that replace the key in a file. After each step copy the file to all hosts; running processes notice it.");
  const auto path = std::make_shared<std::string>();
  const auto step = std::make_shared<std::optional<Step>>();
  command->add_option("FILE", *path, "File to create, which must not exist, or with a step the file to change")
      ->required();
  CLI::Option_group* const steps = command->add_option_group("Steps");
  const auto add_step = [&](const char* name, Step value, const char* help) {
    steps->add_flag_callback(
        name, [step, value] { *step = value; }, help);
  };
  add_step("--add", Step::kAdd, "Step 1: add a new key, which members accept and do not use yet");
  add_step("--switch", Step::kSwitch, "Step 2: let members use the other key of the file, and still accept the former");
  add_step("--retire", Step::kRetire, "Step 3: remove the key that is not in use; connections made with it end");
  steps->require_option(0, 1);
  return [path, step]() -> Result<void> {
    if (*step) {
      KVFERRY_TRY(rotate(**step, *path));
    } else {
      const std::string key = KVFERRY_TRY(new_key());
      KVFERRY_TRY(create(*path, key, nullptr));
    }
    fmt::print("{}\n", *path);
    return {};
  };
}

}  // namespace kvferry::cli
