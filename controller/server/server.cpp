#include "controller/server/server.h"

#include <sys/epoll.h>

#include "controller/api/endpoint.h"
#include "controller/server/node_listeners.h"
#include "controller/state/state_journal.h"

namespace kvferry::controller {
namespace {

constexpr int kTickMs = 100;                  // longest sleep of the loop, so that leases are checked often
constexpr TimeNs kExpireTime = kMillisecond;  // shortest time between lease checks, because a check delays lookups

}  // namespace

Result<std::unique_ptr<Server>> Server::bind(const ServerOptions& options, const Clock& clock) {
  if (options.cluster_key) KVFERRY_TRY(check_for_cluster_key(options.stream));
  auto server = std::make_unique<Server>(options.directory, clock);
  server->endpoint_ =
      KVFERRY_TRY(server->add_bound(listen_zmq(options.bind, server->sessions(), clock, options.cluster_key)));
  if (!options.state.empty()) KVFERRY_TRY(server->open_state(options.state));
  if (!options.stream.empty())
    server->stream_endpoint_ = KVFERRY_TRY(server->add_bound(listen_stream(options.stream, server->sessions(), clock)));
  return server;
}

Result<void> Server::open_state(const std::string& folder) {
  std::unique_ptr<StateJournal> journal = KVFERRY_TRY(StateJournal::open({.folder = folder}, directory(), clock_));
  sessions_.adopt_nodes();
  at_turn_end([kept = journal.get()](TimeNs) { kept->flush(); });
  return add_listener(std::move(journal));
}

Result<void> Server::add_listener(std::unique_ptr<Listener> listener) {
  const int fd = listener->fd();
  if (!can_be_woken_ || (fd >= 0 && !watch(fd)))
    return Error{ErrorCode::kUnavailable,
                 "no file descriptor is left for another listener of the controller; raise the limit (ulimit -n)"};
  listeners_.push_back(std::move(listener));
  return {};
}

Result<std::string> Server::add_bound(Result<std::unique_ptr<BoundListener>> listener) {
  if (!listener) return std::move(listener).error();
  std::string address = (*listener)->address();
  KVFERRY_TRY(add_listener(*std::move(listener)));
  return address;
}

void Server::run() {
  bool more_waits = false;
  TimeNs expired_at = clock_.now() - kExpireTime;
  while (!stopping_.load(std::memory_order_acquire)) {
    epoll_event event{};
    ::epoll_wait(epoll_.get(), &event, 1, more_waits ? 0 : kTickMs);  // 1. sleeps until input, stop() or the next tick
    const TimeNs now = clock_.now();
    more_waits = false;
    for (const std::unique_ptr<Listener>& listener : listeners_)
      more_waits |= listener->serve(now);  // 2. processes messages, also heartbeats
    if (now - expired_at >= kExpireTime) {
      sessions_.expire(now);  // 3. expires leases, now that the heartbeats are processed
      expired_at = now;
    }
    for (const auto& then : turn_ends_) then(now);
  }
}

void Server::stop() {
  stopping_.store(true, std::memory_order_release);
  wake_up_.set();
}

bool Server::watch(int fd) const {
  // Level-triggered, although `fd` may be edge-triggered: no input is missed, because each turn calls every serve().
  epoll_event event{.events = EPOLLIN, .data = {}};
  return ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) == 0;
}

}  // namespace kvferry::controller
