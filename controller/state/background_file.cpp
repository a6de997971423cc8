#include "controller/state/background_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <utility>

#include "controller/state/state_folder.h"
#include "transport/base/result.h"

namespace kvferry::controller {
namespace {

constexpr std::chrono::seconds kSyncEvery{1};

}  // namespace

BackgroundFile::BackgroundFile(WriteCall write, std::function<void()> on_progress)
    : write_(std::move(write)), on_progress_(std::move(on_progress)), thread_([this] { serve(); }) {}

BackgroundFile::~BackgroundFile() {
  {
    const std::lock_guard lock(mutex_);
    is_ending_ = true;
  }
  wake_.notify_one();
  thread_.join();
}

BackgroundFile::Progress BackgroundFile::progress() const {
  const std::lock_guard lock(mutex_);
  return progress_;
}
std::size_t BackgroundFile::queued_bytes() const {
  const std::lock_guard lock(mutex_);
  return queued_bytes_;
}
void BackgroundFile::drain() {
  std::unique_lock lock(mutex_);
  idle_.wait(lock, [this] { return jobs_.empty() && !is_busy_; });
}

void BackgroundFile::open(std::string path) {
  post(0, [this, path = std::move(path)] {
    sync_now();
    path_ = path;
    num_unsynced_ = 0;
    file_ = OwnedFd(::open(path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
    {
      const std::lock_guard lock(mutex_);
      ++progress_.num_opened;
      progress_.size_bytes = 0;
      progress_.failure.clear();
      progress_.is_finished = false;
    }
    if (!file_) return fail("cannot be created", errno);
    sync_folder(std::filesystem::path(path_).parent_path());
  });
}

void BackgroundFile::append(std::string bytes, std::uint64_t mark) {
  const std::size_t num_bytes = bytes.size();
  post(num_bytes, [this, bytes = std::move(bytes), mark] { write_all(bytes, mark); });
}

void BackgroundFile::sync() {
  post(0, [this] { sync_now(); });
}

void BackgroundFile::finish(std::string final_path, std::function<void()> after) {
  post(0, [this, final_path = std::move(final_path), after = std::move(after)] {
    if (!file_) return;
    if (::fdatasync(file_.get()) != 0) return fail("cannot be synced", errno);
    if (::rename(path_.c_str(), final_path.c_str()) != 0) return fail("cannot be renamed", errno);
    sync_folder(std::filesystem::path(final_path).parent_path());
    file_ = OwnedFd();
    after();
    const std::lock_guard lock(mutex_);
    progress_.is_finished = true;
  });
}

void BackgroundFile::discard() {
  post(0, [this] {
    if (path_.empty()) return;
    file_ = OwnedFd();
    ::unlink(path_.c_str());
    path_.clear();
  });
}

// --- The queue and the file's thread --------------------------------------------------------------------------------

void BackgroundFile::post(std::size_t num_bytes, std::function<void()> run) {
  {
    const std::lock_guard lock(mutex_);
    jobs_.push_back({num_bytes, std::move(run)});
    queued_bytes_ += num_bytes;
  }
  wake_.notify_one();
}

void BackgroundFile::serve() {
  auto sync_at = std::chrono::steady_clock::now() + kSyncEvery;
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait_until(lock, sync_at, [this] { return !jobs_.empty() || is_ending_; });
    if (jobs_.empty() && is_ending_) break;
    Job job;
    if (!jobs_.empty()) {
      job = std::move(jobs_.front());
      jobs_.pop_front();
    }
    is_busy_ = true;
    lock.unlock();
    if (job.run) job.run();
    if (const auto now = std::chrono::steady_clock::now(); now >= sync_at) {
      sync_now();
      sync_at = now + kSyncEvery;
    }
    lock.lock();
    queued_bytes_ -= job.num_bytes;
    is_busy_ = false;
    if (jobs_.empty()) idle_.notify_all();
    if (on_progress_) {
      lock.unlock();
      on_progress_();
      lock.lock();
    }
  }
  lock.unlock();
  sync_now();
}

void BackgroundFile::write_all(const std::string& bytes, std::uint64_t mark) {
  if (!file_) return;
  std::size_t num_written = 0;
  while (num_written < bytes.size()) {
    const ssize_t some = write_(file_.get(), bytes.data() + num_written, bytes.size() - num_written);
    if (some > 0) {
      num_written += static_cast<std::size_t>(some);
      continue;
    }
    if (some < 0 && errno == EINTR) continue;
    const int why = some == 0 ? ENOSPC : errno;
    // Removes the part of `bytes` that was written. If that fails too, the next load of the state drops this part.
    [[maybe_unused]] const int cut = ::ftruncate(file_.get(), static_cast<off_t>(progress().size_bytes));
    return fail("cannot be written", why);
  }
  last_written_ = mark;
  num_unsynced_ += bytes.size();
  {
    const std::lock_guard lock(mutex_);
    progress_.size_bytes += bytes.size();
    progress_.written = mark;
  }
  if (num_unsynced_ >= kUnsyncedBytesMax) sync_now();
}

void BackgroundFile::sync_now() {
  if (!file_ || num_unsynced_ == 0) return;
  if (::fdatasync(file_.get()) != 0) return fail("cannot be synced", errno);
  num_unsynced_ = 0;
  const std::lock_guard lock(mutex_);
  progress_.synced = last_written_;
}

void BackgroundFile::fail(std::string_view what, int why) {
  file_ = OwnedFd();
  const std::lock_guard lock(mutex_);
  progress_.failure = fmt::format("{} {}: {}", path_, what, std::strerror(why));
}

}  // namespace kvferry::controller
