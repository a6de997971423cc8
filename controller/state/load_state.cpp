#include "controller/state/load_state.h"

#include <unistd.h>

#include <algorithm>
#include <optional>

#include "controller/state/frames.h"
#include "controller/state/records.h"
#include "transport/base/log.h"

namespace kvferry::controller {
namespace {

class Loader {
 public:
  Loader(const StateFolder& folder, DirectoryState& state) : folder_(folder), state_(state), replayer_(state) {}

  Result<LoadedState> load() {
    Result<StateFolder::Files> files = folder_.files();
    if (!files) return std::move(files).error();
    files_ = std::move(*files);
    const std::uint64_t snapshot = files_.snapshots.empty() ? 0 : *files_.snapshots.rbegin();
    remove_before(snapshot);
    if (snapshot != 0) {
      if (Result<void> read = read_snapshot(snapshot); !read) return std::move(read).error();
    }
    if (Result<void> read = read_logs(std::max<std::uint64_t>(snapshot, 1)); !read) return std::move(read).error();
    loaded_.num_records = replayer_.num_records();
    return std::move(loaded_);
  }

 private:
  /// Left over where the process ended between a snapshot and what it made needless.
  void remove_before(std::uint64_t number) {
    for (auto log = files_.logs.begin(); log != files_.logs.end() && *log < number; log = files_.logs.erase(log))
      ::unlink(folder_.log(*log).c_str());
    for (auto old = files_.snapshots.begin(); old != files_.snapshots.end() && *old < number;
         old = files_.snapshots.erase(old))
      ::unlink(folder_.snapshot(*old).c_str());
  }

  /// nullopt: not to be had. kInvalidArgument: of another format.
  static Result<std::optional<FileHead>> head_of(const std::string& path, std::string_view file) {
    std::optional<FileHead> head;
    scan_frames(file, [&](std::string_view body) {
      head = head_in(body);
      return false;  // the first tells all
    });
    if (head && head->format != kStateFormat) {
      return Error{ErrorCode::kInvalidArgument,
                   fmt::format("{} is of format {}, and this release reads format {}; use the release that wrote it, "
                               "or name another folder by --state",
                               path, head->format, kStateFormat)};
    }
    return head;
  }

  void damaged(const std::string& path, const std::string& how) {
    loaded_.set_aside.push_back(path);
    if (loaded_.damage.empty()) loaded_.damage = fmt::format("{} {}", path, how);
  }

  Result<void> read_snapshot(std::uint64_t number) {
    const std::string path = folder_.snapshot(number);
    Result<MappedFile> file = MappedFile::open(path);
    if (!file) return std::move(file).error();
    const Result<std::optional<FileHead>> head = head_of(path, file->bytes());
    if (!head) return head.error();
    const FrameScan scan = scan_frames(file->bytes(), [&](std::string_view body) { return replayer_.replay(body); });
    if (!replayer_.has_end()) state_.end_blocks();
    if (scan.end != FrameScan::End::kWhole || !replayer_.has_end() || !*head)
      damaged(path, fmt::format("is damaged at byte {} of {}", scan.good_bytes, file->bytes().size()));
    loaded_.snapshot_bytes = file->bytes().size();
    return {};
  }

  Result<void> read_logs(std::uint64_t first) {
    if (!files_.logs.contains(first) && (first > 1 || !files_.logs.empty())) damaged(folder_.log(first), "is missing");
    std::uint64_t number = first;
    for (; files_.logs.contains(number) && loaded_.damage.empty(); ++number) {
      Result<bool> goes_on = read_log(number, number == first);
      if (!goes_on) return std::move(goes_on).error();
      if (!*goes_on) break;
    }
    for (auto rest = files_.logs.lower_bound(number); rest != files_.logs.end(); ++rest) {
      const std::string path = folder_.log(*rest);
      Result<MappedFile> file = MappedFile::open(path);
      if (!file) return std::move(file).error();
      const Result<std::optional<FileHead>> head = head_of(path, file->bytes());
      if (!head) return head.error();
      const bool is_needless = *head ? (*head)->begins_anew : file->bytes().size() < kFrameHeadBytes;
      if (is_needless)  // its snapshot was never finished
        ::unlink(path.c_str());
      else
        damaged(path, "can't be used: what comes before it is missing");
    }
    const std::uint64_t last = files_.logs.empty() ? 0 : *files_.logs.rbegin();
    loaded_.next_number = std::max({first, number, loaded_.damage.empty() ? 0 : last + 1});
    return {};
  }

  /// False: it can't follow the one before.
  Result<bool> read_log(std::uint64_t number, bool is_first) {
    const std::string path = folder_.log(number);
    Result<MappedFile> file = MappedFile::open(path);
    if (!file) return std::move(file).error();
    const Result<std::optional<FileHead>> head = head_of(path, file->bytes());
    if (!head) return head.error();
    if (*head && (*head)->begins_anew && !is_first) return false;
    const FrameScan scan = scan_frames(file->bytes(), [&](std::string_view body) { return replayer_.replay(body); });
    const std::size_t lost_bytes = file->bytes().size() - scan.good_bytes;
    if (scan.end == FrameScan::End::kCorrupt || (scan.end == FrameScan::End::kTorn && follows(number + 1))) {
      damaged(path, fmt::format("is damaged at byte {} of {}", scan.good_bytes, file->bytes().size()));
    } else if (scan.end == FrameScan::End::kTorn) {
      log().info("{} ends in {} bytes of a write that was cut short; they are dropped", path, lost_bytes);
      if (::truncate(path.c_str(), static_cast<off_t>(scan.good_bytes)) != 0)
        return Error{ErrorCode::kUnavailable, fmt::format("{} can't be written; see to its rights", path)};
    }
    loaded_.log_bytes += scan.good_bytes;
    ++loaded_.num_logs;
    return true;
  }

  /// Whether a log goes on where the one before ended.
  bool follows(std::uint64_t number) const {
    if (!files_.logs.contains(number)) return false;
    const Result<MappedFile> file = MappedFile::open(folder_.log(number));
    if (!file) return false;
    const Result<std::optional<FileHead>> head = head_of(folder_.log(number), file->bytes());
    return head && *head && !(*head)->begins_anew;
  }

  const StateFolder& folder_;
  DirectoryState& state_;
  Replayer replayer_;
  StateFolder::Files files_;
  LoadedState loaded_;
};

}  // namespace

Result<LoadedState> load_state(const StateFolder& folder, DirectoryState& state) {
  return Loader(folder, state).load();
}

}  // namespace kvferry::controller
