// A file that a thread of its own writes, so that nobody waits for the disk.
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

/// ::write() in earnest; tests hand in what a full disk or a death in the middle looks like.
using WriteCall = std::function<ssize_t(int fd, const void* data, std::size_t size_bytes)>;

/// One file at a time, each from open() to the next. A file that fails once takes nothing more: it is cut back to its
/// last whole append(), and what comes for it is dropped. What was written is synced about once a second.
/// Threads: one owner calls everything; no call but the destructor and drain() waits.
class BackgroundFile {
 public:
  struct Progress {
    std::uint64_t num_opened = 0;  // open() calls that were come to; what follows is of the last of them
    std::uint64_t written = 0;     // the last mark that was written, of whichever file
    std::uint64_t synced = 0;      // the last that outlives a loss of power
    bool is_finished = false;
    std::uint64_t size_bytes = 0;
    std::string failure;  // empty: none
  };

  /// `told` is called in the file's thread after each change of progress().
  BackgroundFile(WriteCall write, std::function<void()> told);
  /// Writes and syncs what waits.
  ~BackgroundFile();

  /// Makes a file; the one before is synced and closed.
  void open(std::string path);
  /// In one write(). `mark` grows.
  void append(std::string bytes, std::uint64_t mark);
  void sync();
  /// Syncs it, gives it its final name, then calls `after` in the file's thread, if nothing failed.
  void finish(std::string final_path, std::function<void()> after);
  /// Closes and removes it. Nothing fails.
  void discard();

  Progress progress() const;
  std::size_t queued_bytes() const;
  /// Waits until all of it was come to.
  void drain();

 private:
  struct Job {
    std::size_t num_bytes = 0;
    std::function<void()> run;
  };
  void post(std::size_t num_bytes, std::function<void()> run);
  void serve();
  void do_open(std::string path);
  void do_append(const std::string& bytes, std::uint64_t mark);
  void do_sync();
  void do_finish(const std::string& final_path, const std::function<void()>& after);
  void do_discard();
  void fail(std::string_view what, int why);

  WriteCall write_;
  std::function<void()> told_;
  // The thread's own.
  std::string path_;
  OwnedFd file_;
  std::uint64_t last_written_ = 0;
  std::uint64_t last_synced_ = 0;

  mutable std::mutex mutex_;
  std::condition_variable wake_, idle_;
  std::deque<Job> jobs_;
  std::size_t queued_bytes_ = 0;
  bool is_busy_ = false;
  bool is_ending_ = false;
  Progress progress_;
  std::thread thread_;
};

}  // namespace kvferry::controller
