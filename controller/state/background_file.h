// A file that its own thread writes, so that the owner never waits for the disk.
#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "transport/base/owned_fd.h"

namespace kvferry::controller {

/// A function like ::write(); tests pass functions that imitate a full disk or a crash.
using WriteCall = std::function<ssize_t(int fd, const void* data, std::size_t size_bytes)>;

/// Writes one file at a time on a thread of its own. After a failed write the file is cut back to the end of its last
/// complete append(). After any failure further appends are dropped until the next open(). Written bytes are synced
/// about once a second, and more often if many are written: one sync of a large file would delay the syncs of other
/// files on the disk. Threads: one owner makes all calls; only the destructor and drain() wait.
class BackgroundFile {
 public:
  static constexpr std::size_t kUnsyncedBytesMax = std::size_t{8} << 20;  // limit that the last append() may exceed

  struct Progress {
    std::uint64_t num_opened = 0;  // number of processed open() calls; the last three fields are about the newest file
    std::uint64_t written = 0;     // mark of the last append() that was written, in any file
    std::uint64_t synced = 0;      // mark of the last append() that survives a loss of power
    bool is_finished = false;      // true if finish() has succeeded
    std::uint64_t size_bytes = 0;
    std::string failure;  // why the file could not be written; empty: no failure
  };

  /// The file's thread calls `on_progress` when progress() may have changed.
  BackgroundFile(WriteCall write, std::function<void()> on_progress);
  /// Processes everything that is queued, and syncs the file.
  ~BackgroundFile();

  /// Creates a file. Before that, syncs and closes the previous file.
  void open(std::string path);
  /// Queues `bytes` to be written. progress() reports `mark`, which must be higher than in the last call, once the
  /// bytes are written. A caller that passes 0 in all calls gets no such report.
  void append(std::string bytes, std::uint64_t mark);
  void sync();
  /// Syncs the file and renames it to its final path; then the file's thread calls `after`, unless something failed.
  void finish(std::string final_path, std::function<void()> after);
  /// Closes and removes the file. Never reports a failure.
  void discard();

  Progress progress() const;
  std::size_t queued_bytes() const;
  /// Waits until the queue is empty.
  void drain();

 private:
  struct Job {
    std::size_t num_bytes = 0;
    std::function<void()> run;
  };
  void post(std::size_t num_bytes, std::function<void()> run);
  void serve();
  void write_all(const std::string& bytes, std::uint64_t mark);
  void sync_now();
  void fail(std::string_view what, int why);

  WriteCall write_;
  std::function<void()> on_progress_;
  // The members up to num_unsynced_ are used by the file's thread only.
  std::string path_;
  OwnedFd file_;
  std::uint64_t last_written_ = 0;
  std::size_t num_unsynced_ = 0;  // number of bytes of the file that were written since its last sync

  mutable std::mutex mutex_;  // guards jobs_ to progress_
  std::condition_variable wake_, idle_;
  std::deque<Job> jobs_;
  std::size_t queued_bytes_ = 0;
  bool is_busy_ = false;
  bool is_ending_ = false;
  Progress progress_;
  std::thread thread_;
};

}  // namespace kvferry::controller
