// The command `kvferry keygen`.
#include <fcntl.h>
#include <sys/random.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <memory>
#include <system_error>

#include "launch/cli/commands.h"

namespace kvferry::cli {
namespace {

constexpr std::size_t kKeyBytes = 32;

Error failed(const std::string& what, int error_number) {
  return Error{ErrorCode::kUnavailable, fmt::format("{}: {}", what, std::generic_category().message(error_number))};
}

Result<void> write_key(const std::string& path) {
  std::array<std::uint8_t, kKeyBytes> key{};
  if (getrandom(key.data(), key.size(), 0) != static_cast<ssize_t>(key.size()))
    return failed("the system gives no random bytes", errno);
  const std::string text = fmt::format("{:02x}\n", fmt::join(key, ""));
  const int file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (file < 0 && errno == EEXIST)
    return Error{ErrorCode::kInvalidArgument, fmt::format("{} exists; a key is never overwritten", path)};
  if (file < 0) return failed(fmt::format("can't create {}", path), errno);
  errno = ENOSPC;  // the reason to report if write() writes less without setting errno
  const ssize_t written = ::write(file, text.data(), text.size());
  const bool is_kept = written == static_cast<ssize_t>(text.size()) && ::fsync(file) == 0;
  const int error_number = errno;
  ::close(file);
  if (is_kept) return {};
  ::unlink(path.c_str());
  return failed(fmt::format("can't write {}", path), error_number);
}

}  // namespace

Run add_keygen_command(CLI::App& app) {
  CLI::App* const command = app.add_subcommand(
      "keygen", "Write a new cluster key to a file that only its owner can read, for cluster_key_file.");
  const auto path = std::make_shared<std::string>();
  command->add_option("FILE", *path, "File to create; an existing file is never overwritten")->required();
  return [path]() -> Result<void> {
    KVFERRY_TRY(write_key(*path));
    fmt::print("{}\n", *path);
    return {};
  };
}

}  // namespace kvferry::cli
