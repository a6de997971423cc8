#include "controller/state/state_folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>

#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <optional>

namespace kvferry::controller {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kMarker = "kvferry-controller-state";
constexpr std::string_view kMarkerText = "kvferry controller state, format 1\n";
constexpr std::string_view kAdvice = "choose another folder with --state, or --state none to keep no state";

Error unavailable(const std::string& path, std::string_view what, int why) {
  return {ErrorCode::kUnavailable,
          fmt::format("the controller can't keep its state: {} {}: {}; {}", path, what, std::strerror(why), kAdvice)};
}

std::optional<std::uint64_t> number_after(std::string_view prefix, std::string_view name) {
  if (!name.starts_with(prefix)) return std::nullopt;
  name.remove_prefix(prefix.size());
  std::uint64_t number = 0;
  const auto [end, failure] = std::from_chars(name.data(), name.data() + name.size(), number);
  if (failure != std::errc() || end != name.data() + name.size()) return std::nullopt;
  return number;
}

/// Checks the contents of the marker file, or writes them if the file is empty.
Result<void> check_or_mark(const std::string& folder, int marker, const std::string& path) {
  char text[128];
  const ssize_t num_bytes = ::pread(marker, text, sizeof text, 0);
  if (num_bytes < 0) return unavailable(path, "cannot be read", errno);
  const std::string_view found(text, static_cast<std::size_t>(num_bytes));
  if (found == kMarkerText) return {};
  if (!found.empty()) {
    return Error{ErrorCode::kInvalidArgument,
                 fmt::format("the controller's state in {} has the format '{}', which this release can't read; use the "
                             "release that wrote it, or {}",
                             folder, found.substr(0, found.find('\n')), kAdvice)};
  }
  if (::pwrite(marker, kMarkerText.data(), kMarkerText.size(), 0) != static_cast<ssize_t>(kMarkerText.size()))
    return unavailable(path, "cannot be written", errno);
  return {};
}

}  // namespace

Result<StateFolder> StateFolder::open(const std::string& path) {
  std::error_code failure;
  fs::create_directories(path, failure);
  if (failure) return unavailable(path, "cannot be created", failure.value());
  const std::string marker_path = fmt::format("{}/{}", path, kMarker);
  const fs::directory_iterator entries(path, failure);
  if (failure) return unavailable(path, "cannot be read", failure.value());
  const bool is_empty = entries == fs::directory_iterator();
  if (!fs::exists(marker_path, failure) && !is_empty) {
    return Error{ErrorCode::kInvalidArgument,
                 fmt::format("{} is not empty and not a kvferry controller's state folder; {}", path, kAdvice)};
  }
  OwnedFd lock(::open(marker_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  if (!lock) return unavailable(marker_path, "cannot be written", errno);
  if (::flock(lock.get(), LOCK_EX | LOCK_NB) != 0) {
    return Error{ErrorCode::kRefused,
                 fmt::format("another controller uses the state folder {}; stop it, or {}", path, kAdvice)};
  }
  KVFERRY_TRY(check_or_mark(path, lock.get(), marker_path));
  ::chmod(path.c_str(), 0700);  // files contain nodes' secrets, and older releases let all users read them
  if (::access(path.c_str(), R_OK | W_OK | X_OK) != 0) return unavailable(path, "cannot be written", errno);
  for (const fs::directory_entry& entry : fs::directory_iterator(path, failure)) {
    const std::string name = entry.path().filename();
    if (name.starts_with("snapshot-") && name.ends_with(".tmp")) ::unlink(entry.path().c_str());
  }
  return StateFolder(path, std::move(lock));
}

std::string StateFolder::log(std::uint64_t number) const { return fmt::format("{}/log-{:08}", path_, number); }
std::string StateFolder::snapshot(std::uint64_t number) const {
  return fmt::format("{}/snapshot-{:08}", path_, number);
}

Result<StateFolder::Files> StateFolder::files() const {
  std::error_code failure;
  Files files;
  for (fs::directory_iterator entry(path_, failure); !failure && entry != fs::directory_iterator();
       entry.increment(failure)) {
    const std::string name = entry->path().filename();
    if (const auto number = number_after("log-", name)) files.logs.insert(*number);
    if (const auto number = number_after("snapshot-", name)) files.snapshots.insert(*number);
  }
  if (failure) return unavailable(path_, "cannot be read", failure.value());
  return files;
}

void StateFolder::remove_below(std::uint64_t number) const {
  const Result<Files> all = files();
  if (!all) return;  // a later call or the next start removes the files
  for (auto it = all->logs.begin(); it != all->logs.lower_bound(number); ++it) ::unlink(log(*it).c_str());
  for (auto it = all->snapshots.begin(); it != all->snapshots.lower_bound(number); ++it)
    ::unlink(snapshot(*it).c_str());
}

void sync_folder(const std::string& path) {
  const OwnedFd folder(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (folder) ::fsync(folder.get());
}

}  // namespace kvferry::controller
