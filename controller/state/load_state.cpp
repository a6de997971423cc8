// Loads a controller's state at its start: the newest snapshot, and the logs from its number on.
#include <unistd.h>

#include <algorithm>
#include <optional>

#include "controller/state/batches.h"
#include "controller/state/records.h"
#include "controller/state/state_folder.h"
#include "transport/base/log.h"

namespace kvferry::controller {
namespace {

struct StateFile {
  std::string path;
  MappedFile mapped;
  std::optional<FileHead> head;  // none: the file's head is unreadable
  std::string_view bytes() const { return mapped.bytes(); }
};

/// Maps a file and reads its head. Errors: those of MappedFile::open(). kInvalidArgument: the file has another format.
Result<StateFile> open_file(const std::string& path) {
  MappedFile mapped = KVFERRY_TRY(MappedFile::open(path));
  StateFile file{path, std::move(mapped), {}};
  scan_batches(file.bytes(), [&](std::string_view body) {
    file.head = head_in(body);
    return false;  // ends the scan, because only the first batch has a head
  });
  if (!file.head || file.head->format == kStateFormat) return file;
  return Error{ErrorCode::kInvalidArgument,
               fmt::format("{} has format {}, and this release reads format {}; use the release that wrote it, or "
                           "choose another folder with --state",
                           path, file.head->format, kStateFormat)};
}

class Loader {
 public:
  Loader(const StateFolder& folder, DirectoryState& state) : folder_(folder), state_(state), replayer_(state) {}

  Result<LoadedState> load() {
    StateFolder::Files files = KVFERRY_TRY(folder_.files());
    files_ = std::move(files);
    const std::uint64_t snapshot = files_.snapshots.empty() ? 0 : *files_.snapshots.rbegin();
    // Older files remain if the process that finished the snapshot did not remove them, e.g. because it ended before.
    folder_.remove_below(snapshot);
    files_.logs.erase(files_.logs.begin(), files_.logs.lower_bound(snapshot));
    if (snapshot != 0) {
      KVFERRY_TRY(read_snapshot(snapshot));
    }
    KVFERRY_TRY(read_logs(std::max<std::uint64_t>(snapshot, 1)));
    loaded_.num_records = replayer_.num_records();
    return std::move(loaded_);
  }

 private:
  void add_damage(const std::string& path, const std::string& how) {
    loaded_.set_aside.push_back(path);
    if (loaded_.damage.empty()) loaded_.damage = fmt::format("{}: {}", path, how);
  }
  BatchScan replay(const StateFile& file) {
    return scan_batches(file.bytes(), [&](std::string_view body) { return replayer_.replay(body); });
  }

  Result<void> read_snapshot(std::uint64_t number) {
    const StateFile file = KVFERRY_TRY(open_file(folder_.snapshot(number)));
    const BatchScan scan = replay(file);
    if (!replayer_.has_end()) state_.end_blocks();
    if (scan.end != BatchScan::End::kWhole || !replayer_.has_end() || !file.head)
      add_damage(file.path, fmt::format("the file is damaged at byte {} of {}", scan.good_bytes, file.bytes().size()));
    loaded_.snapshot_bytes = file.bytes().size();
    return {};
  }

  Result<void> read_logs(std::uint64_t first) {
    if (!files_.logs.contains(first) && (first > 1 || !files_.logs.empty()))
      add_damage(folder_.log(first), "the file is missing");
    std::uint64_t number = first;
    for (; files_.logs.contains(number) && loaded_.damage.empty(); ++number) {
      const bool is_read = KVFERRY_TRY(read_log(number, number == first));
      if (!is_read) break;
    }
    for (auto rest = files_.logs.lower_bound(number); rest != files_.logs.end(); ++rest) {
      const StateFile file = KVFERRY_TRY(open_file(folder_.log(*rest)));
      const bool is_needless = file.head ? file.head->begins_anew : file.bytes().size() < kBatchHeadBytes;
      if (is_needless)  // the log has no head, or the snapshot that this log requires was never finished
        ::unlink(file.path.c_str());
      else
        add_damage(file.path, "the file cannot be used, because the log before it is missing or could not be read");
    }
    const std::uint64_t last = files_.logs.empty() ? 0 : *files_.logs.rbegin();
    loaded_.next_number = std::max({first, number, loaded_.damage.empty() ? 0 : last + 1});
    return {};
  }

  /// Replays a log. Returns false at once if this log is not the first one and does not continue the log before it.
  Result<bool> read_log(std::uint64_t number, bool is_first) {
    const StateFile file = KVFERRY_TRY(open_file(folder_.log(number)));
    if (file.head && file.head->begins_anew && !is_first) return false;
    const BatchScan scan = replay(file);
    if (scan.end == BatchScan::End::kCorrupt || (scan.end == BatchScan::End::kTorn && is_continued_by(number + 1))) {
      add_damage(file.path, fmt::format("the file is damaged at byte {} of {}", scan.good_bytes, file.bytes().size()));
    } else if (scan.end == BatchScan::End::kTorn) {
      log().info("{}: an interrupted write left an incomplete end of {} bytes, which is dropped", file.path,
                 file.bytes().size() - scan.good_bytes);
      if (::truncate(file.path.c_str(), static_cast<off_t>(scan.good_bytes)) != 0)
        return Error{ErrorCode::kUnavailable,
                     fmt::format("the incomplete end of {} cannot be cut off; check the file's permissions and the "
                                 "disk, or choose another folder with --state",
                                 file.path)};
    }
    loaded_.log_bytes += scan.good_bytes;
    ++loaded_.num_logs;
    return true;
  }

  /// Returns true if the log `number` exists and continues the log before it.
  bool is_continued_by(std::uint64_t number) const {
    if (!files_.logs.contains(number)) return false;
    const Result<StateFile> file = open_file(folder_.log(number));
    return file && file->head && !file->head->begins_anew;
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
