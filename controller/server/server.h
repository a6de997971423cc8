// The controller's server: one thread that drives all listeners of one directory.
#pragma once

#include <sys/epoll.h>

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "controller/api/listener.h"
#include "controller/directory/sessions.h"
#include "transport/base/clock.h"
#include "transport/base/net/cluster_key.h"
#include "transport/base/net/event_fd.h"
#include "transport/base/owned_fd.h"
#include "transport/base/result.h"

namespace kvferry::controller {

struct ServerOptions {
  std::string bind = "tcp://127.0.0.1:14600";    // endpoint of the ZeroMQ listener; port 0: any free port
  std::string stream{};                          // endpoint of the stream listener; empty: none
  std::string state{};                           // folder of the state that outlives the process; empty: none
  std::optional<net::ClusterKey> cluster_key{};  // decides who may connect over tcp://; none: peers need no key
  DirectoryOptions directory;
};

/// Malformed input never ends the server; see Sessions and the listeners.
/// Threads: one owner thread sets the server up and calls run(); any thread or signal handler may call stop().
class Server {
 public:
  /// Makes a server that listens at once, but answers only in run(). `clock` must outlive the server. Errors: those of
  /// listen_zmq(), listen_stream() and StateJournal::open(); kInvalidArgument also if options.stream is stream://
  /// although there is a cluster key; kUnavailable also if no file descriptor is left.
  static Result<std::unique_ptr<Server>> bind(const ServerOptions& options, const Clock& clock);

  /// Makes a server without listeners.
  Server(const DirectoryOptions& options, const Clock& clock) : clock_(clock), sessions_(options, clock.now()) {}

  /// Adds a listener; must not be called after run(). kUnavailable: no file descriptor is left to wait for the
  /// listener's input.
  Result<void> add_listener(std::unique_ptr<Listener> listener);
  /// Same as add_listener(), but takes the Result of making the listener. Returns that Result's error or the error of
  /// add_listener(), if there is one, else the listener's address, in which the port in use replaces a port of 0.
  Result<std::string> add_bound(Result<std::unique_ptr<BoundListener>> listener);
  /// Adds a function that is called at the end of each turn of the loop, after messages and expired leases. The
  /// function must not block for long. at_turn_end() itself must not be called after run().
  void at_turn_end(std::function<void(TimeNs now)> then) { turn_ends_.push_back(std::move(then)); }

  /// The sessions and the directory may be used by listeners, by functions passed to at_turn_end(), and by the caller
  /// before run().
  Sessions& sessions() { return sessions_; }
  Directory& directory() { return sessions_.directory(); }

  /// Returns the actual ZeroMQ endpoint, e.g. "tcp://127.0.0.1:41234".
  const std::string& endpoint() const { return endpoint_; }
  /// Returns the actual endpoint of the stream listener; empty if there is none.
  const std::string& stream_endpoint() const { return stream_endpoint_; }
  /// Serves until stop(); returns at once if stop() was called before.
  void run();
  /// Makes run() return. Async-signal-safe.
  void stop();

 private:
  Result<void> open_state(const std::string& folder);
  bool watch(int fd) const;

  const Clock& clock_;
  Sessions sessions_;  // declared before the listeners, which refer to it
  std::vector<std::unique_ptr<Listener>> listeners_;
  std::vector<std::function<void(TimeNs)>> turn_ends_;
  std::string endpoint_, stream_endpoint_;
  std::atomic<bool> stopping_{false};
  EventFd wake_up_{std::nothrow};
  OwnedFd epoll_{::epoll_create1(EPOLL_CLOEXEC)};
  bool can_be_woken_ = watch(wake_up_.fd());
};

}  // namespace kvferry::controller
