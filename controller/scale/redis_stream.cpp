#include "controller/scale/redis_stream.h"

#include <hiredis/hiredis.h>
#include <sys/socket.h>

#include <cerrno>
#include <chrono>
#include <deque>
#include <system_error>
#include <thread>

#include "controller/scale/owner_queue.h"

namespace kvferry::controller::scale {
namespace {

using SteadyTime = std::chrono::steady_clock::time_point;
using Milliseconds = std::chrono::milliseconds;

constexpr std::int64_t kRedisRetryMsMin = 100;
constexpr std::int64_t kPollMs = 20;       // poll interval at the stream's end
constexpr std::size_t kPartsMax = 4;       // limit on parts that wait for the owner to take them
constexpr std::size_t kPipelinedMax = 64;  // limit on entries in flight
// Assumed least memory of an entry in Redis. The stream's limit in bytes divided by this number is the limit on its
// entries.
constexpr std::size_t kBytesPerEntryMin = 256;

timeval to_timeval(std::int64_t ms) { return {ms / 1000, (ms % 1000) * 1000}; }

struct ReplyDeleter {
  void operator()(redisReply* reply) const { ::freeReplyObject(reply); }
};
using Reply = std::unique_ptr<redisReply, ReplyDeleter>;

class HiredisStream final : public RedisStream {
 public:
  explicit HiredisStream(RedisStreamOptions options) : options_(std::move(options)) {
    state_.trouble = fmt::format("Redis at {} has not replied yet", options_.url.server.host_port());
    thread_ = std::thread([this] { run(); });
  }
  ~HiredisStream() override {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
      if (context_ != nullptr) ::shutdown(context_->fd, SHUT_RDWR);
      changed_.notify_all();
    }
    parts_.close();
    thread_.join();
  }

  int fd() const override { return parts_.fd(); }

  bool append(std::string entry) override {
    const std::lock_guard lock(mutex_);
    if (state_.buffered_bytes + entry.size() > options_.buffer_bytes_max) return false;
    state_.buffered_bytes += entry.size();
    waiting_.push_back(std::move(entry));
    changed_.notify_all();
    return true;
  }

  void start_reading() override {
    const std::lock_guard lock(mutex_);
    is_reading_ = true;
    changed_.notify_all();
  }
  void stop_reading() override {
    const std::lock_guard lock(mutex_);
    is_reading_ = false;
  }

  std::vector<LogPart> take() override { return parts_.take(1); }

  LogState state() const override {
    const std::lock_guard lock(mutex_);
    return state_;
  }

 private:
  void run() {
    block_all_signals();
    std::int64_t retry_ms = kRedisRetryMsMin;
    while (!is_stopping()) {
      Result<void> done = connect();
      if (done) {
        retry_ms = kRedisRetryMsMin;
        while (done && !is_stopping()) done = work();
      }
      disconnect(done ? "" : done.error().what);
      std::unique_lock lock(mutex_);
      changed_.wait_for(lock, Milliseconds(retry_ms), [&] { return stopping_; });
      retry_ms = std::min(retry_ms * 2, options_.retry_ms_max);
    }
  }

  /// Runs one round: appends waiting entries, reads entries, and trims the stream. Waits if there is nothing to do.
  Result<void> work() {
    std::vector<std::string> batch;
    bool is_reading = false;
    const SteadyTime now = std::chrono::steady_clock::now();
    {
      std::unique_lock lock(mutex_);
      const SteadyTime until = is_reading_ ? std::min(read_at_, trim_at_) : trim_at_;
      changed_.wait_until(lock, until, [&] {
        return stopping_ || !waiting_.empty() || (is_reading_ && std::chrono::steady_clock::now() >= read_at_);
      });
      if (stopping_) return {};
      is_reading = is_reading_;
      const std::size_t num = std::min(waiting_.size(), kPipelinedMax);
      batch.assign(waiting_.begin(), waiting_.begin() + static_cast<std::ptrdiff_t>(num));
    }
    KVFERRY_TRY(append_all(batch));
    if (is_reading && std::chrono::steady_clock::now() >= read_at_) {
      KVFERRY_TRY(read_part());
    }
    if (now < trim_at_) return {};
    trim_at_ = now + Milliseconds(options_.trim_ms);
    return trim();
  }

  /// Appends entries to the stream. The entries stay in waiting_ until Redis confirms them.
  Result<void> append_all(const std::vector<std::string>& batch) {
    const std::string& stream = options_.url.stream;
    const std::string entries_max = std::to_string(options_.url.bytes_max / kBytesPerEntryMin);
    for (const std::string& entry : batch) {
      const char* words[] = {"XADD", stream.data(), "MAXLEN", "~", entries_max.data(), "*", "e", entry.data()};
      const std::size_t sizes[] = {4, stream.size(), 6, 1, entries_max.size(), 1, 1, entry.size()};
      ::redisAppendCommandArgv(context_, static_cast<int>(std::size(words)), words, sizes);
    }
    for (std::size_t i = 0; i < batch.size(); ++i) {
      void* raw = nullptr;
      const int status = ::redisGetReply(context_, &raw);
      const Reply reply(static_cast<redisReply*>(raw));
      KVFERRY_TRY(check(status == REDIS_OK ? reply.get() : nullptr));
      const std::lock_guard lock(mutex_);
      state_.buffered_bytes -= waiting_.front().size();
      waiting_.pop_front();
      ++state_.num_appended;
    }
    return {};
  }

  Result<void> read_part() {
    const Reply reply =
        ask({"XREAD", "COUNT", std::to_string(options_.entries_per_read), "STREAMS", options_.url.stream, read_below_});
    KVFERRY_TRY(check(reply.get()));
    LogPart part;
    // The reply is [[stream, [[id, [field, value, ...]], ...]]], or nil at the stream's end.
    if (reply->type == REDIS_REPLY_ARRAY && reply->elements == 1 && reply->element[0]->elements == 2) {
      const redisReply& entries = *reply->element[0]->element[1];
      for (std::size_t i = 0; i < entries.elements; ++i) {
        const redisReply& entry = *entries.element[i];
        if (entry.elements != 2 || entry.element[0]->str == nullptr) continue;
        read_below_.assign(entry.element[0]->str, entry.element[0]->len);
        const redisReply& fields = *entry.element[1];
        if (fields.elements >= 2 && fields.element[1]->str != nullptr)
          part.entries.emplace_back(fields.element[1]->str, fields.element[1]->len);
      }
    }
    part.at_end = part.entries.size() < options_.entries_per_read;
    read_at_ = std::chrono::steady_clock::now() + Milliseconds(part.at_end ? kPollMs : 0);
    parts_.put(std::move(part));
    return {};
  }

  /// Trims the stream to about 90 % of its limit in bytes if it exceeds the limit. MAXLEN counts entries; their sizes
  /// differ a thousandfold, so the number of entries to keep is computed from the stream's actual memory.
  Result<void> trim() {
    const Reply used = ask({"MEMORY", "USAGE", options_.url.stream});
    KVFERRY_TRY(check(used.get()));
    if (used->type != REDIS_REPLY_INTEGER || used->integer <= 0) return {};  // nil: there is no such stream yet
    const auto bytes = static_cast<std::size_t>(used->integer);
    if (bytes <= options_.url.bytes_max) return {};
    const Reply length = ask({"XLEN", options_.url.stream});
    KVFERRY_TRY(check(length.get()));
    const double share = 0.9 * static_cast<double>(options_.url.bytes_max) / static_cast<double>(bytes);
    const auto num_kept = static_cast<std::uint64_t>(static_cast<double>(length->integer) * share);
    const Reply trimmed = ask({"XTRIM", options_.url.stream, "MAXLEN", "~", std::to_string(num_kept)});
    return check(trimmed.get());
  }

  Result<void> connect() {
    const ServiceUrl& server = options_.url.server;
    redisContext* context =
        ::redisConnectWithTimeout(server.address.host.c_str(), server.address.port, to_timeval(options_.connect_ms));
    if (context == nullptr)
      return Error{ErrorCode::kUnavailable,
                   fmt::format("no memory is left for a connection to Redis at {}", server.host_port())};
    {
      const std::lock_guard lock(mutex_);
      context_ = context;
      // The destructor could not end this connection before now. Without this the destructor would wait for replies.
      if (stopping_) ::shutdown(context->fd, SHUT_RDWR);
    }
    if (context->err != 0) return broken();
    ::redisSetTimeout(context, to_timeval(options_.reply_ms));
    ::redisEnableKeepAlive(context);
    if (!server.password.empty()) {
      const Reply reply =
          server.user.empty() ? ask({"AUTH", server.password}) : ask({"AUTH", server.user, server.password});
      KVFERRY_TRY(check(reply.get()));
    }
    const Reply selected = ask({"SELECT", std::to_string(options_.url.database)});
    KVFERRY_TRY(check(selected.get()));
    const std::lock_guard lock(mutex_);
    state_.is_connected = true;
    state_.trouble.clear();
    return {};
  }

  void disconnect(const std::string& trouble) {
    const std::lock_guard lock(mutex_);
    if (context_ != nullptr) ::redisFree(context_);
    context_ = nullptr;
    state_.is_connected = false;
    state_.trouble = trouble;
  }

  Reply ask(const std::vector<std::string>& command) {
    std::vector<const char*> words;
    std::vector<std::size_t> sizes;
    for (const std::string& word : command) {
      words.push_back(word.data());
      sizes.push_back(word.size());
    }
    return Reply(static_cast<redisReply*>(
        ::redisCommandArgv(context_, static_cast<int>(words.size()), words.data(), sizes.data())));
  }

  Result<void> check(const redisReply* reply) const {
    if (reply == nullptr) return broken();
    if (reply->type != REDIS_REPLY_ERROR) return {};
    return Error{ErrorCode::kRefused,
                 fmt::format("Redis at {} answered with an error: {}", options_.url.server.host_port(),
                             std::string_view(reply->str, std::min<std::size_t>(reply->len, 200)))};
  }
  Error broken() const {
    std::string why = context_->errstr;  // has the text for errno, as it was when the call failed
    if (why == std::generic_category().message(EAGAIN))
      why = fmt::format("no reply came within {} ms", options_.reply_ms);
    return {ErrorCode::kUnavailable,
            fmt::format("the connection to Redis at {} failed: {}", options_.url.server.host_port(), why)};
  }
  bool is_stopping() const {
    const std::lock_guard lock(mutex_);
    return stopping_;
  }

  const RedisStreamOptions options_;
  OwnerQueue<LogPart> parts_{kPartsMax};
  mutable std::mutex mutex_;  // guards the following members, up to context_
  std::condition_variable changed_;
  bool stopping_ = false;
  bool is_reading_ = false;
  std::deque<std::string> waiting_;
  LogState state_;
  redisContext* context_ = nullptr;  // only thread_ changes this, while it holds mutex_

  // The following members, up to trim_at_, are used by thread_ only.
  std::string read_below_ = "0";  // id of the last entry that was read
  SteadyTime read_at_{};
  SteadyTime trim_at_ = std::chrono::steady_clock::now();
  std::thread thread_;
};

}  // namespace

std::unique_ptr<RedisStream> make_redis_stream(RedisStreamOptions options) {
  return std::make_unique<HiredisStream>(std::move(options));
}

}  // namespace kvferry::controller::scale
