#include "launch/bench/controller/controller_echo.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <array>
#include <memory>
#include <thread>
#include <zmq.hpp>

#include "controller/protocol/stream_socket.h"
#include "transport/base/owned_fd.h"

namespace kvferry::bench {
namespace {

constexpr int kTickMs = 100;  // as in the server's loop

/// The state of the echo's thread.
struct ZmqEcho {
  zmq::context_t context{1};
  zmq::socket_t router{context, zmq::socket_type::router};
  OwnedFd epoll{::epoll_create1(EPOLL_CLOEXEC)};

  void run() {
    epoll_event event{.events = EPOLLIN, .data = {}};
    ::epoll_ctl(epoll.get(), EPOLL_CTL_ADD, router.get(zmq::sockopt::fd), &event);
    for (;;) {
      ::epoll_wait(epoll.get(), &event, 1, kTickMs);
      zmq::message_t frame;
      while (router.recv(frame, zmq::recv_flags::dontwait)) {
        const bool has_more = frame.more();
        router.send(frame, has_more ? zmq::send_flags::sndmore : zmq::send_flags::none);
      }
    }
  }
};

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
      if (OwnedFd socket = controller::accept_from(listener.socket.get())) watch(socket.release());
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
  try {
    auto echo = std::make_unique<ZmqEcho>();
    echo->router.bind("tcp://127.0.0.1:0");
    std::string endpoint = echo->router.get(zmq::sockopt::last_endpoint);
    std::thread([echo = std::move(echo)] { echo->run(); }).detach();
    return endpoint;
  } catch (const zmq::error_t& failure) {
    return Error{ErrorCode::kUnavailable, fmt::format("no ZeroMQ echo: {}", failure.what())};
  }
}

Result<std::string> start_stream_echo(const std::string& path) {
  Result<controller::BoundSocket> listener = controller::listen_on({.path = path});
  if (!listener) return std::move(listener).error();
  std::string endpoint = listener->endpoint;
  std::thread([listener = std::move(*listener)] { echo_streams(listener); }).detach();
  return endpoint;
}

}  // namespace kvferry::bench
