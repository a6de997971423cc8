// A Redis or Valkey stream used as a log of byte strings. A thread of its own talks to the server, so that the owner
// never waits.
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
  std::int64_t retry_ms_max = 2000;  // longest pause between attempts to connect; the first is 100 ms, then it doubles
  std::size_t buffer_bytes_max = 16U << 20;  // limit on the size of unconfirmed entries
  std::int64_t trim_ms = 1000;               // period of the check of the stream's memory
  std::size_t entries_per_read = 32;
};

/// Entries that were read together, in order.
struct LogPart {
  std::vector<std::string> entries;
  bool at_end = false;  // the stream had no further entries
};

struct LogState {
  bool is_connected = false;
  std::string trouble;  // why there is no connection; empty while connected
  std::size_t buffered_bytes = 0;
  std::uint64_t num_appended = 0;  // entries confirmed by Redis
};

/// A connection to one stream. Threads: one owner makes all calls.
class RedisStream {
 public:
  virtual ~RedisStream() = default;

  /// Returns a file descriptor that is readable while take() has parts to return.
  virtual int fd() const = 0;
  /// Queues an entry for appending; never blocks. Entries are appended in order. Entries that were unconfirmed when a
  /// connection broke may appear twice. Returns false, without queueing the entry, if the buffer is full.
  virtual bool append(std::string entry) = 0;
  /// Reads all entries from the oldest one on, then new entries, until stop_reading() is called. Each entry arrives
  /// once, even after a reconnect.
  virtual void start_reading() = 0;
  virtual void stop_reading() = 0;
  /// Returns the next part, or an empty vector if no part waits. Never blocks.
  virtual std::vector<LogPart> take() = 0;
  virtual LogState state() const = 0;
};

/// Starts the thread. The destructor drops unsent entries; only an attempt to connect and log in can delay it, by up to
/// connect_ms and twice reply_ms.
std::unique_ptr<RedisStream> make_redis_stream(RedisStreamOptions options);

}  // namespace kvferry::controller::scale
