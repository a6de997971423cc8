#include "launch/bench/controller/controller_far_side.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "controller/protocol/stream_socket.h"
#include "controller/server/server.h"
#include "launch/bench/controller/controller_nodes.h"
#include "launch/bench/harness/pinned.h"
#include "transport/base/log.h"
#include "transport/base/net/tcp_socket.h"
#include "transport/base/net/zmq_socket.h"

namespace kvferry::bench {
namespace {

constexpr TimeNs kReadyPatience = 600 * kSecond;
constexpr int kTickMs = 100;  // longest wait for a message, the same as in the controller's loop

void echo_messages(net::ZmqSocket& router) {
  std::array<net::ZmqPart, 2> parts;  // the sender's id and the message
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

// The time of a round trip to an echo server is a lower bound for the time of a remote lookup, because an echo server
// only returns each message, over the same kind of socket and with the same waits as the controller. Each echo server
// runs on a thread until the process ends.

std::string start_zmq_echo() {
  auto router = need(net::ZmqSocket::make(std::make_shared<net::ZmqContext>(), net::ZmqKind::kRouter));
  need(router->bind("tcp://127.0.0.1:0"));
  std::string endpoint = router->endpoint();
  std::thread([router = std::move(router)] { echo_messages(*router); }).detach();
  return endpoint;
}

std::string start_stream_echo(const std::string& path) {
  controller::BoundSocket listener = need(controller::listen_on({.path = path}));
  std::string endpoint = listener.endpoint;
  std::thread([listener = std::move(listener)] { echo_streams(listener); }).detach();
  return endpoint;
}

void load_into(controller::Directory& directory, const ControllerLoad& load, TimeNs now) {
  DirectoryWorkers workers(directory, now);
  std::vector<controller::ChunkEntry> chunks(kBatchKeys);
  for_each_batch(0, load.num_prefixes(), [&](std::uint32_t worker, std::uint64_t prefix, std::uint64_t position) {
    fill_chunks(prefix, position, chunks);
    workers.publish(worker, chunks, now);
  });
}

/// Runs the controller and the echo servers in the child process, until that process is killed.
void serve(const ControllerLoad& load, const std::string& folder, LineLink& link) {
  log().set_level(spdlog::level::err);
  const SteadyClock clock;
  controller::ServerOptions options{
      .bind = "tcp://127.0.0.1:0", .stream = "unix://" + folder + "/controller", .directory = {}};
  options.directory.lease_ms = 24 * 3600 * 1000;  // a lease of a day, because the workers send no heartbeats
  options.directory.chunks_per_node_max = kControllerHashesMax;
  options.directory.chunks_max = 2 * kControllerHashesMax;
  options.directory.index.seed = 1;
  const std::unique_ptr<controller::Server> server = need(controller::Server::bind(options, clock));
  load_into(server->directory(), load, clock.now());
  need(link.send({{"zmq", server->endpoint()},
                  {"stream", server->stream_endpoint()},
                  {"zmq_echo", start_zmq_echo()},
                  {"stream_echo", start_stream_echo(folder + "/echo")}}));
  server->run();
}

}  // namespace

ControllerFarSide::ControllerFarSide(const ControllerLoad& load) {
  int pipe[2];
  if (::pipe(pipe) != 0)
    throw Failure(
        {ErrorCode::kUnavailable,
         fmt::format("can't create a pipe for the benchmark's controller process: {}", std::strerror(errno))});
  child_.emplace(OwnedFd(pipe[0]));
  OwnedFd to_parent(pipe[1]);
  pid_ = ::fork();
  if (pid_ == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    pin_calling_thread(1);  // the client is pinned to core 0; fixed cores make round trips comparable
    LineLink link({}, std::move(to_parent));
    if (const Result<void> served = attempt([&] { serve(load, folder_.path(), link); }); !served)
      (void)link.send(to_json(served.error()));
    ::_exit(0);
  }
  if (pid_ < 0)
    throw Failure({ErrorCode::kUnavailable,
                   fmt::format("can't fork a process for the benchmark's controller: {}", std::strerror(errno))});
}

void ControllerFarSide::wait_filled() {
  Result<nlohmann::json> up = checked(child_->receive(kReadyPatience));
  if (!up) throw Failure(std::move(up).error().with("the controller that the benchmark starts"));
  zmq = up->at("zmq");
  stream = up->at("stream");
  zmq_echo = up->at("zmq_echo");
  stream_echo = up->at("stream_echo");
}

ControllerFarSide::~ControllerFarSide() {
  ::kill(pid_, SIGKILL);
  ::waitpid(pid_, nullptr, 0);
}

}  // namespace kvferry::bench
