#include "transport/base/net/tcp_socket.h"

#include <gmock/gmock.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <array>

#include "tests/transport/base/net/ipv6.h"

namespace kvferry::net {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;

int option(const OwnedFd& socket, int level, int name) {
  int value = 0;
  socklen_t bytes = sizeof(value);
  EXPECT_EQ(::getsockopt(socket.get(), level, name, &value, &bytes), 0);
  return value;
}

void wait(const OwnedFd& socket, short events) {
  pollfd waiting{socket.get(), events, 0};
  ASSERT_EQ(::poll(&waiting, 1, 10'000), 1);
}

/// Sends bytes from a client to a server that listens on `listen_host`, and checks both sockets.
void make_round_trip(const std::string& listen_host, const std::string& connect_host) {
  const TcpListener listener = listen_tcp(listen_host, 0).value();
  ASSERT_NE(listener.address.port, 0);
  const OwnedFd client = begin_connect_tcp({connect_host, listener.address.port}).value();
  wait(client, POLLOUT);
  ASSERT_EQ(connect_error(client.get()), "");
  wait(listener.socket, POLLIN);
  const OwnedFd server = accept_tcp(listener.socket.get());
  ASSERT_TRUE(server);
  EXPECT_EQ(peer_address(client.get()), (HostPort{connect_host, listener.address.port}));
  ASSERT_EQ(::send(client.get(), "ping", 4, 0), 4);
  wait(server, POLLIN);
  std::array<char, 8> bytes{};
  EXPECT_EQ(::recv(server.get(), bytes.data(), bytes.size(), 0), 4);
  for (const OwnedFd* socket : {&client, &server}) {
    EXPECT_EQ(option(*socket, SOL_SOCKET, SO_KEEPALIVE), 1);
    EXPECT_EQ(option(*socket, IPPROTO_TCP, TCP_KEEPIDLE), kKeepaliveIdleSeconds);
    EXPECT_EQ(option(*socket, IPPROTO_TCP, TCP_NODELAY), 1);
  }
}

TEST(TcpSocket, ConnectsOverIpv4) { make_round_trip("127.0.0.1", "127.0.0.1"); }

TEST(TcpSocket, ConnectsOverIpv6) {
  SKIP_WITHOUT_IPV6();
  make_round_trip("::1", "::1");
}

TEST(TcpSocket, AListenerOnAllInterfacesAcceptsBothFamilies) {
  make_round_trip("*", "127.0.0.1");
  SKIP_WITHOUT_IPV6();
  make_round_trip("*", "::1");
}

TEST(TcpSocket, AcceptedConnectionsInheritKeepaliveFromTheListener) {
  const TcpListener listener = listen_tcp("127.0.0.1", 0).value();
  const OwnedFd client = connect_tcp(listener.address).value();
  const OwnedFd server(::accept(listener.socket.get(), nullptr, nullptr));
  EXPECT_EQ(option(server, SOL_SOCKET, SO_KEEPALIVE), 1);
  EXPECT_EQ(option(server, IPPROTO_TCP, TCP_KEEPIDLE), kKeepaliveIdleSeconds);
}

TEST(TcpSocket, FailuresNameTheAddress) {
  const TcpListener listener = listen_tcp("127.0.0.1", 0).value();
  const Result<TcpListener> second = listen_tcp("127.0.0.1", listener.address.port);
  ASSERT_FALSE(second);
  EXPECT_EQ(second.error().code, ErrorCode::kUnavailable);
  EXPECT_THAT(second.error().what, HasSubstr(to_text(listener.address)));
  const Result<TcpListener> unknown = listen_tcp("nobody.invalid", 0);
  ASSERT_FALSE(unknown);
  EXPECT_EQ(unknown.error().code, ErrorCode::kInvalidArgument);
  EXPECT_THAT(unknown.error().what, HasSubstr("'nobody.invalid'"));
  const Result<OwnedFd> refused = connect_tcp({"127.0.0.1", 1});
  ASSERT_FALSE(refused);
  EXPECT_THAT(refused.error().what, HasSubstr("127.0.0.1:1"));
}

TEST(TcpSocket, NamesAreToldFromNumbers) {
  for (const char* host : {"127.0.0.1", "::1", "fd00::7"}) EXPECT_TRUE(is_numeric(host)) << host;
  for (const char* host : {"localhost", "::g", ""}) EXPECT_FALSE(is_numeric(host)) << host;
  for (const char* host : {"127.0.0.1", "127.0.1.1", "::1"}) EXPECT_TRUE(is_loopback(host)) << host;
  for (const char* host : {"10.0.0.1", "fd00::1"}) EXPECT_FALSE(is_loopback(host)) << host;
  EXPECT_THAT(resolve("localhost").value(), Contains(::testing::ResultOf(is_loopback, true)));
}

TEST(TcpSocket, TheSourceAddressTowardsLoopbackIsLoopback) {
  EXPECT_EQ(source_address_towards("127.0.0.1").value(), "127.0.0.1");
  EXPECT_EQ(source_address_towards("localhost").value(), "127.0.0.1") << "IPv4 comes first";
  EXPECT_EQ(source_address_towards("nobody.invalid").error().code, ErrorCode::kInvalidArgument);
  SKIP_WITHOUT_IPV6();
  EXPECT_EQ(source_address_towards("::1").value(), "::1");
}

}  // namespace
}  // namespace kvferry::net
