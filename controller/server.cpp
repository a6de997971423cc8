#include "controller/server.h"

#include <sys/epoll.h>

#include "controller/zmq_front.h"

namespace kvferry::controller {
namespace {

constexpr int kTickMs = 100;  // how often leases are looked at, at least

}  // namespace

Result<std::unique_ptr<Server>> Server::bind(const ServerOptions& options, const Clock& clock) {
  auto server = std::make_unique<Server>(options.directory, clock);
  Result<std::unique_ptr<ZmqFront>> zmq = ZmqFront::bind(options.bind, server->sessions());
  if (!zmq) return std::move(zmq).error();
  server->endpoint_ = (*zmq)->endpoint();
  if (Result<void> added = server->add_front(std::move(*zmq)); !added) return std::move(added).error();
  return server;
}

Result<void> Server::add_front(std::unique_ptr<Front> front) {
  const int fd = front->fd();
  if (!can_be_woken_ || (fd >= 0 && !watch(fd)))
    return Error{ErrorCode::kUnavailable, "no file descriptor left for one more way in to the controller"};
  fronts_.push_back(std::move(front));
  return {};
}

void Server::run() {
  bool more_waits = false;
  while (!stopping_.load(std::memory_order_acquire)) {
    epoll_event event{};
    ::epoll_wait(epoll_.get(), &event, 1, more_waits ? 0 : kTickMs);  // 1. sleep until a word, stop() or the next tick
    const TimeNs now = clock_.now();
    more_waits = false;
    for (const std::unique_ptr<Front>& front : fronts_) more_waits |= front->take(now);  // 2. words of life are heard
    sessions_.expire(now);  // 3. ... before the silent are forgotten
    for (const auto& then : turn_ends_) then(now);
  }
}

void Server::stop() {
  stopping_.store(true, std::memory_order_release);
  wake_up_.raise();
}

bool Server::watch(int fd) const {
  // Edge-triggered fronts are none the worse for it: take() is called in every turn, whatever is readable.
  epoll_event event{.events = EPOLLIN, .data = {}};
  return ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) == 0;
}

}  // namespace kvferry::controller
