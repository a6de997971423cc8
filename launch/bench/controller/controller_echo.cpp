#include "launch/bench/controller/controller_echo.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <array>
#include <memory>
#include <thread>

#include "controller/protocol/stream_socket.h"
#include "transport/base/net/tcp_socket.h"
#include "transport/base/net/zmq_socket.h"
#include "transport/base/owned_fd.h"

namespace kvferry::bench {
namespace {

constexpr int kTickMs = 100;  // as in the server's loop

void echo_messages(net::ZmqSocket& router) {
  std::array<net::ZmqPart, 2> parts;  // sender, bytes
  for (;;) {
    pollfd waiting{router.fd(), POLLIN, 0};
    ::poll(&waiting, 1, kTickMs);
    while (router.receive(parts) == parts.size())
      router.send(std::array<std::string_view, 2>{parts[0].bytes(), parts[1].bytes()});
  }
}

void echo_streams(const controller::BoundSocket& listener) {
  const OwnedFd epoll(::epoll_create1(EPOLL_CLOEXEC));
  const auto watch = [&](int fd) {
    epoll_event event{.events = EPOLLIN, .data = {.fd = fd}};
    ::epoll_ctl(epoll.get(), EPOLL_CTL_ADD, fd, &event);
  };
  watch(listener.socket.get());
  std::array<char, 4096> bytes;
  for (;;) {
    epoll_event event{};
    if (::epoll_wait(epoll.get(), &event, 1, kTickMs) != 1) continue;
    if (event.data.fd == listener.socket.get()) {
      if (OwnedFd socket = net::accept_tcp(listener.socket.get())) watch(socket.release());
      continue;
    }
    const ssize_t num_read = ::recv(event.data.fd, bytes.data(), bytes.size(), 0);
    if (num_read <= 0)
      ::close(event.data.fd);
    else
      ::send(event.data.fd, bytes.data(), static_cast<std::size_t>(num_read), MSG_NOSIGNAL);
  }
}

}  // namespace

Result<std::string> start_zmq_echo() {
  auto router = net::ZmqSocket::make(std::make_shared<net::ZmqContext>(), net::ZmqKind::kRouter);
  if (!router) return std::move(router).error();
  if (Result<void> bound = (*router)->bind("tcp://127.0.0.1:0"); !bound) return std::move(bound).error();
  std::string endpoint = (*router)->endpoint();
  std::thread([router = std::move(*router)] { echo_messages(*router); }).detach();
  return endpoint;
}

Result<std::string> start_stream_echo(const std::string& path) {
  Result<controller::BoundSocket> listener = controller::listen_on({.path = path});
  if (!listener) return std::move(listener).error();
  std::string endpoint = listener->endpoint;
  std::thread([listener = std::move(*listener)] { echo_streams(listener); }).detach();
  return endpoint;
}

}  // namespace kvferry::bench
