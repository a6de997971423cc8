// Tests a loss of power, after which only synced data of a state folder is left. This program's own fsync() and
// fdatasync() replace those of libc, and record which names, and how much of each file, the disk has.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "controller/state/background_file.h"
#include "controller/state/state_journal.h"
#include "tests/controller/fixtures.h"
#include "tests/manual_clock.h"

namespace kvferry::controller {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;
using Steady = std::chrono::steady_clock;

/// What a disk certainly has of one folder. Threads: any.
class Disk {
 public:
  /// `kept`: an empty folder for links to the files, so that files can be read after they were removed.
  Disk(fs::path folder, fs::path kept) : folder_(std::move(folder)), kept_(std::move(kept)) {}

  void sync(int fd) {
    const fs::path path = fs::read_symlink(fmt::format("/proc/self/fd/{}", fd));
    const std::lock_guard lock(mutex_);
    if (path.parent_path() == folder_) {
      struct stat file {};
      ::fstat(fd, &file);
      sizes_[file.st_ino] = static_cast<std::uintmax_t>(file.st_size);
    }
    if (path != folder_) return;
    names_.clear();
    for (const fs::directory_entry& entry : fs::directory_iterator(folder_)) {
      struct stat file {};
      if (::stat(entry.path().c_str(), &file) != 0) continue;  // the file was renamed meanwhile
      names_[entry.path().filename()] = file.st_ino;
      std::error_code is_there;
      fs::create_hard_link(entry.path(), kept_ / std::to_string(file.st_ino), is_there);
    }
  }
  /// Writes everything that would be left after a loss of power now into an empty folder.
  void leave(const fs::path& to) {
    const std::lock_guard lock(mutex_);
    for (const auto& [name, inode] : names_) {
      fs::copy_file(kept_ / std::to_string(inode), to / name);
      fs::resize_file(to / name, sizes_.contains(inode) ? sizes_[inode] : 0);
    }
  }

 private:
  const fs::path folder_, kept_;
  std::mutex mutex_;
  std::map<std::string, ino_t> names_;
  std::map<ino_t, std::uintmax_t> sizes_;  // number of synced bytes; a missing entry means 0
};

Disk* g_disk = nullptr;

/// Sizes of a file at its syncs.
struct Syncs {
  void note(int fd) {
    struct stat file {};
    ::fstat(fd, &file);
    if (fs::read_symlink(fmt::format("/proc/self/fd/{}", fd)) == path) sizes.push_back(file.st_size);
  }
  fs::path path;
  std::vector<off_t> sizes{};
};
Syncs* g_syncs = nullptr;  // used by one BackgroundFile's thread

int sync_for_real(const char* call, int fd) {
  if (g_disk != nullptr) g_disk->sync(fd);
  if (g_syncs != nullptr) g_syncs->note(fd);
  return reinterpret_cast<int (*)(int)>(::dlsym(RTLD_NEXT, call))(fd);
}

}  // namespace
}  // namespace kvferry::controller

extern "C" int fsync(int fd) { return kvferry::controller::sync_for_real("fsync", fd); }
extern "C" int fdatasync(int fd) { return kvferry::controller::sync_for_real("fdatasync", fd); }

namespace kvferry::controller {
namespace {

constexpr milliseconds kRun{3600};
// the log is synced once a second; twice that, because the machine may be busy
constexpr milliseconds kSurelySynced{2000};

/// Returns how many of the keys [0, end), counted from the first one, a controller that loads this folder knows.
std::uint32_t num_loaded(const fs::path& folder, std::uint32_t end) {
  ManualClock clock;
  Directory directory{{.index = {.seed = 1}}};
  const auto journal = StateJournal::open({.folder = folder}, directory, clock);
  if (!journal) {
    ADD_FAILURE() << journal.error().what;
    return 0;
  }
  EXPECT_EQ((*journal)->status(0).why_not, "");
  const NodeId probe = directory.join(node_info("probe"), 0, 0)->id;
  const auto holders = directory.lookup(probe, {keys_of(0, end), {}, {}}, 0).value();
  return holders.empty() ? 0 : holders[0].num_full_chunks;
}

TEST(PowerLoss, LeavesWhatIsOlderThanTwoSeconds) {
  const fs::path root = fs::canonical(fs::temp_directory_path()) / fmt::format("kvferry-power-{}", ::getpid());
  for (const char* name : {"kept", "after"}) fs::create_directories(root / name);
  Disk disk(root / "state", root / "kept");
  g_disk = &disk;
  std::uint32_t num_lost_max = 0;
  {
    ManualClock clock;
    Directory directory{{.index = {.seed = 1}}};
    const auto journal = StateJournal::open({.folder = root / "state"}, directory, clock).value();
    const NodeId node = directory.join(node_info("a"), 0, 0)->id;
    directory.publish(node, 0, SnapshotMark::kReplaces, {}, 0);
    std::vector<Steady::time_point> written;  // [key]: time at which the key was in the file, synced or not
    const auto begin = Steady::now();
    auto next_loss = begin + milliseconds(100);
    for (bool has_snapshot = false; Steady::now() < begin + kRun;) {
      const auto key = static_cast<std::uint32_t>(written.size());
      directory.publish(node, directory.repair(node).resend_from, SnapshotMark::kNone, full_chunks(key, key + 1), 0);
      // A snapshot makes new files, renames and removes files, and syncs. One early snapshot is enough for this test.
      if (!has_snapshot && Steady::now() > begin + milliseconds(700)) {
        journal->want_snapshot();
        has_snapshot = true;
      }
      journal->serve(0);
      journal->drain();
      written.push_back(Steady::now());
      std::this_thread::sleep_for(milliseconds(5));
      if (Steady::now() < next_loss) continue;
      next_loss += milliseconds(100);
      const auto surely = std::upper_bound(written.begin(), written.end(), Steady::now() - kSurelySynced);
      const auto num_surely = static_cast<std::uint32_t>(surely - written.begin());
      for (const fs::directory_entry& entry : fs::directory_iterator(root / "after")) fs::remove(entry.path());
      disk.leave(root / "after");
      const auto end = static_cast<std::uint32_t>(written.size());
      const std::uint32_t num_left = num_loaded(root / "after", end);
      ASSERT_GE(num_left, num_surely) << "of " << end;
      num_lost_max = std::max(num_lost_max, end - num_left);
    }
    EXPECT_TRUE(fs::exists(root / "state" / "snapshot-00000002"));
    EXPECT_GT(num_lost_max, 20U) << "nothing was lost, so this showed nothing";
  }
  g_disk = nullptr;
  fs::remove_all(root);
}

TEST(BackgroundFile, IsSyncedInPiecesSoThatNoSyncTakesLong) {
  const fs::path root = fs::canonical(fs::temp_directory_path()) / fmt::format("kvferry-pieces-{}", ::getpid());
  fs::create_directories(root);
  Syncs syncs{root / "snapshot"};
  g_syncs = &syncs;
  constexpr std::size_t kAppended = std::size_t{1} << 20;
  constexpr int kAppends = 40;
  {
    BackgroundFile file(::write, nullptr);
    file.open(syncs.path);
    for (int i = 0; i < kAppends; ++i) file.append(std::string(kAppended, 'x'), 0);
    file.finish(root / "final", [] {});
    file.drain();
    EXPECT_TRUE(file.progress().is_finished) << file.progress().failure;
  }
  g_syncs = nullptr;
  off_t synced = 0;
  for (const off_t size : syncs.sizes) {
    EXPECT_LT(size - synced, static_cast<off_t>(BackgroundFile::kUnsyncedBytesMax + kAppended));
    synced = size;
  }
  EXPECT_EQ(synced, static_cast<off_t>(kAppends * kAppended)) << "all of it";
  fs::remove_all(root);
}

}  // namespace
}  // namespace kvferry::controller
