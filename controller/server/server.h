// The controller's server: one thread that drives every way in to one directory.
#pragma once

#include <sys/epoll.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "controller/api/listener.h"
#include "controller/directory/sessions.h"
#include "controller/protocol/wake_up.h"
#include "transport/base/clock.h"
#include "transport/base/owned_fd.h"
#include "transport/base/result.h"

namespace kvferry::controller {

struct ServerOptions {
  std::string bind = "tcp://127.0.0.1:14600";  // over ZeroMQ; port 0: any free one
  std::string stream{};                        // unix:// or stream://; empty: no stream
  std::string state{};                         // the folder that keeps what outlives the process; empty: nothing does
  DirectoryOptions directory;
};

/// Whatever a peer sends, the server goes on: see Sessions and the fronts.
/// Threads: one composes it and calls run(); stop() from any thread or signal handler.
class Server {
 public:
  /// Listens from here on; nothing is answered before run(). `clock` must outlive the server.
  /// kInvalidArgument: not an endpoint; kUnavailable: the address can't be listened on, e.g. port in use.
  /// Of the state folder: StateJournal::open().
  static Result<std::unique_ptr<Server>> bind(const ServerOptions& options, const Clock& clock);

  /// With no way in yet.
  Server(const DirectoryOptions& options, const Clock& clock) : clock_(clock), sessions_(options, clock.now()) {}

  /// Before run(). kUnavailable: its descriptor can't be waited for.
  Result<void> add_front(std::unique_ptr<Listener> front);
  /// Called at the end of each turn of the loop, when everything that waited was taken in and the silent are forgotten.
  /// Before run(). Must not block for long.
  void at_turn_end(std::function<void(TimeNs now)> then) { turn_ends_.push_back(std::move(then)); }

  /// For fronts and at_turn_end(): on the thread of run(), or before it.
  Sessions& sessions() { return sessions_; }
  Directory& directory() { return sessions_.directory(); }

  /// Where it listens over ZeroMQ in fact, e.g. "tcp://127.0.0.1:41234".
  const std::string& endpoint() const { return endpoint_; }
  /// The same of the stream; empty: there is none.
  const std::string& stream_endpoint() const { return stream_endpoint_; }
  /// Serves until stop() was called, also if that was before run().
  void run();
  /// Async-signal-safe.
  void stop();

 private:
  Result<void> keep_state(const std::string& folder);
  bool watch(int fd) const;

  const Clock& clock_;
  Sessions sessions_;  // before the fronts, which refer to it
  std::vector<std::unique_ptr<Listener>> fronts_;
  std::vector<std::function<void(TimeNs)>> turn_ends_;
  std::string endpoint_, stream_endpoint_;
  std::atomic<bool> stopping_{false};
  WakeUp wake_up_;
  OwnedFd epoll_{::epoll_create1(EPOLL_CLOEXEC)};
  bool can_be_woken_ = watch(wake_up_.fd());
};

}  // namespace kvferry::controller
