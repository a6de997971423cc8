#include "launch/bench/harness/tcp.h"

#include <poll.h>
#include <sys/socket.h>

namespace kvferry::bench {

Result<OwnedFd> tcp_accept(const net::TcpListener& listener, const Deadline& deadline) {
  while (true) {
    if (Result<void> ok = deadline.check("a connection"); !ok) return std::move(ok).error();
    pollfd waiting{listener.socket.get(), POLLIN, 0};
    if (::poll(&waiting, 1, 100) != 1) continue;
    OwnedFd socket(::accept4(listener.socket.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!socket) continue;
    net::set_tcp_options(socket.get());
    return socket;
  }
}

}  // namespace kvferry::bench
