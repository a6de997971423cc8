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

BackgroundFile::BackgroundFile(WriteCall write, std::function<void()> told)
    : write_(std::move(write)), told_(std::move(told)), thread_([this] { serve(); }) {}

BackgroundFile::~BackgroundFile() {
  {
    const std::lock_guard lock(mutex_);
    is_ending_ = true;
  }
  wake_.notify_one();
  thread_.join();
}

void BackgroundFile::open(std::string path) {
  post(0, [this, path = std::move(path)]() mutable { do_open(std::move(path)); });
}
void BackgroundFile::append(std::string bytes, std::uint64_t mark) {
  const std::size_t num_bytes = bytes.size();
  post(num_bytes, [this, bytes = std::move(bytes), mark] { do_append(bytes, mark); });
}
void BackgroundFile::sync() {
  post(0, [this] { do_sync(); });
}
void BackgroundFile::finish(std::string final_path, std::function<void()> after) {
  post(0, [this, final_path = std::move(final_path), after = std::move(after)] { do_finish(final_path, after); });
}
void BackgroundFile::discard() {
  post(0, [this] { do_discard(); });
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
      do_sync();
      sync_at = now + kSyncEvery;
    }
    lock.lock();
    queued_bytes_ -= job.num_bytes;
    is_busy_ = false;
    if (jobs_.empty()) idle_.notify_all();
    if (told_) {
      lock.unlock();
      told_();
      lock.lock();
    }
  }
  lock.unlock();
  do_sync();
}

void BackgroundFile::do_open(std::string path) {
  do_sync();
  path_ = std::move(path);
  file_ = OwnedFd(::open(path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
  {
    const std::lock_guard lock(mutex_);
    ++progress_.num_opened;
    progress_.size_bytes = 0;
    progress_.failure.clear();
    progress_.is_finished = false;
  }
  if (!file_) return fail("can't be made", errno);
  sync_folder(std::filesystem::path(path_).parent_path());
}

void BackgroundFile::do_append(const std::string& bytes, std::uint64_t mark) {
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
    // Without the torn end; if that can't be had either, a reload drops it.
    [[maybe_unused]] const int cut = ::ftruncate(file_.get(), static_cast<off_t>(progress().size_bytes));
    return fail("can't be written", why);
  }
  last_written_ = mark;
  const std::lock_guard lock(mutex_);
  progress_.size_bytes += bytes.size();
  progress_.written = mark;
}

void BackgroundFile::do_sync() {
  if (!file_ || last_synced_ == last_written_) return;
  if (::fdatasync(file_.get()) != 0) return fail("can't be synced", errno);
  last_synced_ = last_written_;
  const std::lock_guard lock(mutex_);
  progress_.synced = last_synced_;
}

void BackgroundFile::do_finish(const std::string& final_path, const std::function<void()>& after) {
  if (!file_) return;
  if (::fdatasync(file_.get()) != 0) return fail("can't be synced", errno);
  if (::rename(path_.c_str(), final_path.c_str()) != 0) return fail("can't be renamed", errno);
  sync_folder(std::filesystem::path(final_path).parent_path());
  file_ = OwnedFd();
  after();
  const std::lock_guard lock(mutex_);
  progress_.is_finished = true;
}

void BackgroundFile::do_discard() {
  if (path_.empty()) return;
  file_ = OwnedFd();
  ::unlink(path_.c_str());
  path_.clear();
}

void BackgroundFile::fail(std::string_view what, int why) {
  file_ = OwnedFd();
  const std::lock_guard lock(mutex_);
  progress_.failure = fmt::format("{} {}: {}", path_, what, std::strerror(why));
}

}  // namespace kvferry::controller
