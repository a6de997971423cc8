#include "cut_relay.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <chrono>
#include <stdexcept>

namespace kvferry::faults {
namespace {

sockaddr_in local(std::uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(port);
  return address;
}

/// Closes a connection so that the other side sees a reset.
void reset(int fd) {
  const linger now{1, 0};
  ::setsockopt(fd, SOL_SOCKET, SO_LINGER, &now, sizeof now);
  ::close(fd);
}

}  // namespace

CutRelay::CutRelay(std::uint16_t target_port)
    : target_port_(target_port),
      listener_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)) {
  sockaddr_in address = local(0);
  socklen_t size = sizeof address;
  if (::bind(listener_.get(), reinterpret_cast<sockaddr*>(&address), size) != 0 || ::listen(listener_.get(), 64) != 0 ||
      ::getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&address), &size) != 0)
    throw std::runtime_error("a relay finds no port");
  port_ = ntohs(address.sin_port);
  epoll_event event{.events = EPOLLIN, .data = {.fd = listener_.get()}};
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, listener_.get(), &event);
  thread_ = std::thread([this] { run(); });
}

CutRelay::~CutRelay() {
  stopping_ = true;
  thread_.join();
  while (!other_end_.empty()) close_pair(other_end_.begin()->first);
}

void CutRelay::run() {
  while (!stopping_) {
    if (way_ == Way::kCut) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      continue;
    }
    epoll_event events[32];
    const int num = ::epoll_wait(epoll_.get(), events, 32, 20);
    if (way_ == Way::kBroken)
      while (!other_end_.empty()) close_pair(other_end_.begin()->first);
    for (int i = 0; i < num; ++i) {
      const int fd = events[i].data.fd;
      if (fd == listener_.get())
        accept_one();
      else if (other_end_.contains(fd))
        move_bytes(fd);
    }
  }
}

void CutRelay::accept_one() {
  const int near = ::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC);
  if (near < 0) return;
  const int far = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = local(target_port_);
  if (way_ == Way::kBroken || far < 0 || ::connect(far, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) {
    reset(near);
    if (far >= 0) ::close(far);
    return;
  }
  other_end_[near] = far;
  other_end_[far] = near;
  for (const int fd : {near, far}) {
    const int yes = 1;
    ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    // a limit on send(), because a peer that does not read must not stop the relay forever
    const timeval patience{0, 200'000};
    ::setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    epoll_event event{.events = EPOLLIN, .data = {.fd = fd}};
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event);
  }
}

void CutRelay::move_bytes(int from) {
  char bytes[65536];
  const ssize_t size = ::recv(from, bytes, sizeof bytes, MSG_DONTWAIT);
  if (size == 0 || (size < 0 && errno != EAGAIN)) return close_pair(from);
  for (ssize_t done = 0; done < size;) {
    const ssize_t sent = ::send(other_end_[from], bytes + done, static_cast<std::size_t>(size - done), MSG_NOSIGNAL);
    if (sent <= 0) return close_pair(from);
    done += sent;
  }
}

void CutRelay::close_pair(int fd) {
  const int other = other_end_.at(fd);
  other_end_.erase(fd);
  other_end_.erase(other);
  reset(fd);
  reset(other);
}

}  // namespace kvferry::faults
