// A Redis or Valkey stream as a log of bytes, that never makes its owner wait: a thread of its own speaks with it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "controller/scale/url.h"

namespace kvferry::controller::scale {

struct RedisStreamOptions {
  RedisUrl url;
  std::int64_t connect_ms = 1000;
  std::int64_t reply_ms = 2000;
  std::int64_t retry_ms_max = 2000;          // between attempts to connect; begins at 100 and doubles
  std::size_t buffer_bytes_max = 16U << 20;  // of entries that wait, or wait for their reply
  std::int64_t trim_ms = 1000;               // how often the stream's memory is looked at
  std::size_t entries_per_read = 32;
};

/// A part of what was read, in order.
struct LogPart {
  std::vector<std::string> entries;
  bool at_end = false;  // there was no more at that moment
};

struct LogState {
  bool is_connected = false;
  std::string trouble;  // of the last failure, "" if none since it connected
  std::size_t buffered_bytes = 0;
  std::uint64_t num_appended = 0;  // entries that Redis has confirmed
};

/// Threads: one owner, for all calls.
class RedisStream {
 public:
  virtual ~RedisStream() = default;

  /// Readable while parts wait.
  virtual int fd() const = 0;
  /// Never blocks. Entries arrive in order, and again where a connection broke before they were confirmed. False: the
  /// buffer is full, and the entry is not taken.
  virtual bool append(std::string entry) = 0;
  /// Reads all that is there, from the oldest on, and then what is added, until stop_reading(). What was read already
  /// comes once, also over a reconnect.
  virtual void start_reading() = 0;
  virtual void stop_reading() = 0;
  /// The next part, if one waits.
  virtual std::vector<LogPart> take() = 0;
  virtual LogState state() const = 0;
};

/// Starts the thread. The destructor drops what waits; it ends at once, but for a connection being made (connect_ms).
std::unique_ptr<RedisStream> make_redis_stream(RedisStreamOptions options);

}  // namespace kvferry::controller::scale
