#include "controller/scale/etcd.h"

#include <atomic>
#include <deque>
#include <thread>

#include "controller/scale/etcd_gateway.h"
#include "controller/scale/etcd_messages.h"
#include "controller/scale/owner_queue.h"

namespace kvferry::controller::scale {
namespace {

constexpr std::size_t kEventsMax = 1024;  // limit on events waiting for the owner; at this limit the threads wait
constexpr std::int64_t kEtcdRetryMsMin = 100;

class HttpEtcd final : public Etcd {
 public:
  explicit HttpEtcd(EtcdOptions options) : options_(std::move(options)) {
    requester_ = std::thread([this] { run_requester(); });
    watcher_ = std::thread([this] { run_watcher(); });
  }
  ~HttpEtcd() override {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
      changed_.notify_all();
    }
    events_.close();
    // stop() does not affect a connection that is being made, so it is repeated until both threads have ended.
    while (num_running_ > 0) {
      request_gateway_.stop();
      watch_gateway_.stop();
      std::this_thread::sleep_for(Milliseconds(5));
    }
    requester_.join();
    watcher_.join();
  }

  int fd() const override { return events_.fd(); }

  void ask(std::uint64_t token, EtcdRequest request) override {
    const std::lock_guard lock(mutex_);
    if (requests_.size() < options_.requests_max) {
      requests_.emplace_back(token, std::move(request));
      changed_.notify_all();
    } else {
      events_.wake();             // take() returns the refusal
      refused_.push_back(token);  // refused_ needs no limit, because the owner limits the requests in flight
    }
  }

  std::vector<EtcdEvent> take(std::size_t num_max) override {
    std::vector<EtcdEvent> events = events_.take(num_max);
    const std::lock_guard lock(mutex_);
    for (const std::uint64_t token : refused_) {
      events.emplace_back(EtcdReply{
          .token = token,
          .error =
              Error{ErrorCode::kFull,
                    fmt::format("{} requests to etcd wait already, which is the limit; this one is sent again later",
                                options_.requests_max)}});
    }
    refused_.clear();
    return events;
  }

 private:
  bool is_stopping() {
    const std::lock_guard lock(mutex_);
    return stopping_;
  }
  /// Waits for `ms` milliseconds. Returns false, without waiting to the end, if the client is stopping.
  bool sleep(std::int64_t ms) {
    std::unique_lock lock(mutex_);
    return !changed_.wait_for(lock, Milliseconds(ms), [&] { return stopping_; });
  }

  void run_requester() {
    block_all_signals();
    for (;;) {
      std::pair<std::uint64_t, EtcdRequest> next;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return stopping_ || !requests_.empty(); });
        if (stopping_) break;
        next = std::move(requests_.front());
        requests_.pop_front();
      }
      Result<EtcdReply> reply = execute(next.second);
      if (!reply) {
        // The member may be down or have no leader, so later requests go to the next one. Only the owner decides
        // whether this request may be repeated.
        if (reply.error().code == ErrorCode::kUnavailable) request_gateway_.next_member();
        reply = EtcdReply{.error = std::move(reply).error()};
      }
      reply->token = next.first;
      if (!events_.put(std::move(*reply))) break;
    }
    --num_running_;
  }

  Result<EtcdReply> execute(const EtcdRequest& request) {
    KVFERRY_TRY(request_gateway_.log_in());
    const std::string body = KVFERRY_TRY(request_gateway_.post(post_of(request), options_.request_ms));
    Result<EtcdReply> reply = reply_of(request, body);
    if (!reply && reply.error().code == ErrorCode::kCancelled) request_gateway_.log_out();
    return reply;
  }

  void run_watcher() {
    block_all_signals();
    std::int64_t retry_ms = kEtcdRetryMsMin;
    std::optional<std::int64_t> next_revision;  // revision to watch from; none: all keys must be read first
    bool is_lost = false;
    for (;;) {
      const Result<void> done = watch(next_revision, is_lost, retry_ms);
      if (is_stopping()) break;
      if (done) continue;  // watches again: there was no change for quiet_ms, or the revision is compacted
      next_revision.reset();
      watch_gateway_.next_member();
      if (!is_lost && !events_.put(EtcdLost{done.error().what})) break;
      is_lost = true;
      if (!sleep(retry_ms)) break;
      retry_ms = std::min(retry_ms * 2, options_.retry_ms_max);
    }
    --num_running_;
  }

  /// Watches until nothing arrived for quiet_ms, the revision is compacted, or an error occurred. First sends a read
  /// request, which also shows that the member has a leader.
  Result<void> watch(std::optional<std::int64_t>& next_revision, bool& is_lost, std::int64_t& retry_ms) {
    KVFERRY_TRY(watch_gateway_.log_in());
    const bool wants_all = !next_revision.has_value();
    const std::string body =
        KVFERRY_TRY(watch_gateway_.post(range_of(options_.watched_prefix, !wants_all), options_.request_ms));
    Result<EtcdAll> all = all_of(body);
    if (!all) {
      if (all.error().code == ErrorCode::kCancelled) watch_gateway_.log_out();
      return std::move(all).error();
    }
    if (!wants_all && all->revision + 1 < *next_revision)
      return Error{
          ErrorCode::kUnavailable,
          fmt::format(
              "etcd's revision decreased from {} to {}, so etcd has lost data; the controller reads all keys again",
              *next_revision - 1, all->revision)};
    if (wants_all) {
      next_revision = all->revision + 1;
      if (!events_.put(std::move(*all))) return {};
      is_lost = false;
      retry_ms = kEtcdRetryMsMin;
    }
    std::string rest;  // the beginning of an incomplete line
    std::optional<Error> broken;
    bool is_compacted = false;
    auto received_at = std::chrono::steady_clock::now();
    const auto take_line = [&](std::string_view line) {
      Result<WatchLine> watched = watch_line_of(line);
      if (!watched) {
        broken = std::move(watched).error();
      } else if (watched->is_compacted) {
        is_compacted = true;
      } else if (watched->is_cancelled) {
        broken = Error{
            ErrorCode::kUnavailable,
            fmt::format("etcd cancelled the watch of the keys that begin with '{}'; the controller begins it again",
                        options_.watched_prefix)};
      } else if (!watched->changes.changes.empty()) {
        // The last change's revision is used, because the revision in the header may be ahead of the changes.
        const auto& last = watched->changes.changes.back();
        const auto* pair = std::get_if<EtcdPair>(&last);
        next_revision = 1 + (pair != nullptr ? pair->mod_revision : std::get<EtcdErased>(last).revision);
        return events_.put(std::move(watched->changes));
      }
      return !broken && !is_compacted;
    };
    const Result<void> ended = watch_gateway_.stream(
        watch_of(options_.watched_prefix, *next_revision), options_.quiet_ms, [&](std::string_view bytes) {
          received_at = std::chrono::steady_clock::now();
          rest += bytes;
          for (std::size_t end = 0; (end = rest.find('\n')) != std::string::npos; rest.erase(0, end + 1)) {
            if (end > 0 && !take_line(std::string_view(rest).substr(0, end))) return false;
          }
          return rest.size() <= options_.bytes_max;
        });
    if (broken) return std::move(*broken);
    if (is_compacted) {
      next_revision.reset();
      return {};
    }
    // httplib reports a timeout and a broken connection alike, but only a timeout comes after quiet_ms without input.
    if (std::chrono::steady_clock::now() - received_at >= Milliseconds(options_.quiet_ms) * 9 / 10) return {};
    return ended ? Error{ErrorCode::kUnavailable,
                         fmt::format(
                             "etcd closed the watch of the keys that begin with '{}'; the controller begins it again",
                             options_.watched_prefix)}
                 : Result<void>(ended.error());
  }

  const EtcdOptions options_;
  OwnerQueue<EtcdEvent> events_{kEventsMax};
  std::mutex mutex_;  // guards stopping_, requests_ and refused_
  std::condition_variable changed_;
  bool stopping_ = false;
  std::deque<std::pair<std::uint64_t, EtcdRequest>> requests_;
  std::vector<std::uint64_t> refused_;
  EtcdGateway request_gateway_{options_};
  EtcdGateway watch_gateway_{options_};
  std::atomic<int> num_running_{2};
  std::thread requester_;
  std::thread watcher_;
};

}  // namespace

std::unique_ptr<Etcd> make_etcd(EtcdOptions options) { return std::make_unique<HttpEtcd>(std::move(options)); }

}  // namespace kvferry::controller::scale
