#include "launch/bench/harness/interrupt.h"

#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include "launch/bench/harness/failure.h"

namespace kvferry::bench {
namespace {

volatile sig_atomic_t g_interrupted = 0;

extern "C" void on_interrupt(int) {
  g_interrupted = 1;
  ::alarm(3);
}

}  // namespace

void catch_interrupts() {
  struct sigaction action {};  // SA_RESTART is not set, so that blocking calls return with EINTR
  action.sa_handler = on_interrupt;
  for (const int number : {SIGINT, SIGTERM}) ::sigaction(number, &action, nullptr);
}

bool is_interrupted() { return g_interrupted != 0; }

Error interrupted() { return {ErrorCode::kCancelled, "the benchmark was interrupted by Ctrl-C or SIGTERM"}; }

Deadline::Deadline(TimeNs timeout_ns) : timeout_(timeout_ns), end_(SteadyClock().now() + timeout_ns) {}

Result<void> Deadline::check(const char* what) const {
  if (is_interrupted()) return interrupted();
  if (SteadyClock().now() >= end_)
    return Error{ErrorCode::kTimeout,
                 fmt::format("{} did not arrive within {} s", what, static_cast<double>(timeout_) / kSecond)};
  return {};
}

OwnedFd tcp_accept(const net::TcpListener& listener, const Deadline& deadline) {
  while (true) {
    need(deadline.check("a connection of the benchmark's other process"));
    pollfd waiting{listener.socket.get(), POLLIN, 0};
    if (::poll(&waiting, 1, 100) != 1) continue;
    OwnedFd socket(::accept4(listener.socket.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!socket) continue;
    net::set_tcp_options(socket.get());
    return socket;
  }
}

}  // namespace kvferry::bench
