#include "transport/base/net/spare_fd.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <array>

#include "transport/base/net/tcp_socket.h"

namespace kvferry::net {
namespace {

/// While this object lives, the process can't open any descriptor.
class NoDescriptors {
 public:
  NoDescriptors() {
    ::getrlimit(RLIMIT_NOFILE, &before_);
    const int lowest_free = OwnedFd(::dup(0)).get();
    const rlimit none{static_cast<rlim_t>(lowest_free), before_.rlim_max};
    ::setrlimit(RLIMIT_NOFILE, &none);
  }
  ~NoDescriptors() { ::setrlimit(RLIMIT_NOFILE, &before_); }

 private:
  rlimit before_{};
};

bool is_readable(int fd) {
  pollfd waiting{fd, POLLIN, 0};
  return ::poll(&waiting, 1, 0) == 1;
}

TEST(SpareFd, WithoutDescriptorsPendingConnectionsAreRefusedAndTheListenerIsQuiet) {
  SpareFd spare;
  const TcpListener listener = listen_tcp("127.0.0.1", 0).value();
  std::array<OwnedFd, 3> clients;
  for (OwnedFd& client : clients) client = connect_tcp(listener.address).value();
  {
    const NoDescriptors none;
    for (std::size_t i = 0; i < clients.size(); ++i) {
      ASSERT_TRUE(is_readable(listener.socket.get()));
      ASSERT_FALSE(accept_tcp(listener.socket.get()));
      EXPECT_TRUE(spare.refuse(listener.socket.get(), "test"));
    }
    EXPECT_FALSE(is_readable(listener.socket.get()));
    EXPECT_FALSE(accept_tcp(listener.socket.get()));
    EXPECT_FALSE(spare.refuse(listener.socket.get(), "test"));  // there is no pending connection
  }
  EXPECT_EQ(spare.num_refused(), clients.size());
  for (const OwnedFd& client : clients) {
    char byte = 0;
    EXPECT_LE(::recv(client.get(), &byte, 1, 0), 0);
  }
  const OwnedFd late = connect_tcp(listener.address).value();
  EXPECT_TRUE(accept_tcp(listener.socket.get()));
}

TEST(FdReserve, EndsAConnectionWhoseDescriptorIsCloseToTheLimit) {
  std::array<int, 2> ends{};
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends.data()), 0);
  const OwnedFd server(ends[0]), client(ends[1]);
  FdReserve reserve;
  reserve.accepted(server.get(), "test");
  EXPECT_FALSE(is_readable(client.get()));
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit lower{static_cast<rlim_t>(server.get()) + 1, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &lower), 0);
  reserve.accepted(server.get(), "test");
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_TRUE(is_readable(client.get()));
  EXPECT_EQ(reserve.num_refused(), 1u);
}

}  // namespace
}  // namespace kvferry::net
