#include "transport/base/net/zmq_socket.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <linux/filter.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <vector>

#include "tests/transport/base/net/ipv6.h"
#include "transport/base/net/tcp_socket.h"

namespace kvferry::net {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

const std::shared_ptr<ZmqContext>& context() {
  static const auto made = std::make_shared<ZmqContext>();
  return made;
}

std::unique_ptr<ZmqSocket> make(ZmqKind kind, ZmqOptions options = {}) {
  return ZmqSocket::make(context(), kind, options).value();
}

std::unique_ptr<ZmqSocket> bound(const std::string& endpoint) {
  auto router = make(ZmqKind::kRouter);
  const Result<void> done = router->bind(endpoint);
  EXPECT_TRUE(done) << done.error().what;
  return router;
}

/// Waits until fd() is readable, as users do. Returns an empty message after 10 s.
std::vector<std::string> wait_message(ZmqSocket& socket) {
  for (int i = 0; i < 1000; ++i) {
    std::array<ZmqPart, 4> parts;
    if (const std::size_t num_parts = socket.receive(parts)) {
      std::vector<std::string> message;
      for (std::size_t at = 0; at < num_parts; ++at) message.emplace_back(parts[at].bytes());
      return message;
    }
    pollfd waiting{socket.fd(), POLLIN, 0};
    if (::poll(&waiting, 1, 10'000) != 1) break;
  }
  return {};
}

void make_zmq_round_trip(const std::string& bind, const std::string& connect_host) {
  const auto server = bound(bind);
  const HostPort address = address_of_endpoint(server->endpoint()).value();
  const auto client = make(ZmqKind::kDealer);
  ASSERT_TRUE(client->connect("tcp://" + to_text({connect_host, address.port})));
  ASSERT_TRUE(client->send("question"));
  const std::vector<std::string> question = wait_message(*server);
  ASSERT_EQ(question.size(), 2U);
  EXPECT_EQ(question[1], "question");
  ASSERT_TRUE(server->send(std::array<std::string_view, 2>{question[0], "answer"}));
  EXPECT_THAT(wait_message(*client), ElementsAre("answer"));
}

TEST(ZmqSocket, CarriesMessagesOverIpv4) { make_zmq_round_trip("tcp://127.0.0.1:0", "127.0.0.1"); }

TEST(ZmqSocket, CarriesMessagesOverIpv6) {
  SKIP_WITHOUT_IPV6();
  make_zmq_round_trip("tcp://[::1]:0", "::1");
}

TEST(ZmqSocket, AListenerOnAllInterfacesAcceptsBothFamilies) {
  make_zmq_round_trip("tcp://*:0", "127.0.0.1");
  SKIP_WITHOUT_IPV6();
  make_zmq_round_trip("tcp://*:0", "::1");
}

TEST(ZmqSocket, AHostNameIsTriedOverIpv4AndThenOverIpv6) {
  make_zmq_round_trip("tcp://localhost:0", "localhost");
  SKIP_WITHOUT_IPV6();
  const auto server = bound("tcp://[::1]:0");
  const auto client = make(ZmqKind::kDealer);
  const HostPort address = address_of_endpoint(server->endpoint()).value();
  ASSERT_TRUE(client->connect("tcp://" + to_text({"localhost", address.port})));
  const Result<std::vector<std::string>> addresses = resolve("localhost");
  if (std::ranges::count(*addresses, "::1") == 0) GTEST_SKIP() << "localhost is not ::1 here";
  ASSERT_TRUE(client->reconnect());
  ASSERT_TRUE(client->send("question"));
  EXPECT_EQ(wait_message(*server).size(), 2U);
}

/// Returns how many bytes a process of this user gets when it connects to the abstract socket. ZeroMQ sends a greeting
/// to permitted users only. Returns -1 if the process can't become this user or can't connect.
int bytes_greeted_with(const std::string& name, uid_t user) {
  int results[2];
  if (::pipe(results) != 0) return -1;
  const pid_t child = ::fork();
  if (child == 0) {  // the child uses only system calls, because other threads may have held locks at the fork
    int got = -1;
    sockaddr_un to{};
    to.sun_family = AF_UNIX;
    std::memcpy(to.sun_path + 1, name.data(), name.size());
    const int fd = ::socket(AF_UNIX, SOCK_STREAM, 0);
    const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
    if ((user == ::geteuid() || ::syscall(SYS_setresuid, user, user, user) == 0) &&
        ::connect(fd, reinterpret_cast<const sockaddr*>(&to), length) == 0) {
      char greeting[16];
      got = static_cast<int>(::recv(fd, greeting, sizeof(greeting), 0));
      if (got < 0) got = 0;  // ZeroMQ has reset the connection
    }
    static_cast<void>(!::write(results[1], &got, sizeof(got)));
    ::_exit(0);
  }
  int got = -1;
  EXPECT_EQ(::read(results[0], &got, sizeof(got)), static_cast<ssize_t>(sizeof(got)));
  ::waitpid(child, nullptr, 0);
  ::close(results[0]);
  ::close(results[1]);
  return got;
}

TEST(ZmqSocket, ALocalSocketLetsInNoOtherUser) {
  const std::string name = "kvferry-test-" + std::to_string(::getpid());
  const auto server = bound("ipc://@" + name);
  const auto client = make(ZmqKind::kDealer);
  ASSERT_TRUE(client->connect(server->endpoint()));
  ASSERT_TRUE(client->send("question"));
  EXPECT_EQ(wait_message(*server).size(), 2U);
  EXPECT_GT(bytes_greeted_with(name, ::geteuid()), 0);
  if (::geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  EXPECT_EQ(bytes_greeted_with(name, 65534), 0);
}

TEST(ZmqSocket, FailuresNameTheEndpoint) {
  const auto server = bound("tcp://127.0.0.1:0");
  const Result<void> second = make(ZmqKind::kRouter)->bind(server->endpoint());
  ASSERT_FALSE(second);
  EXPECT_EQ(second.error().code, ErrorCode::kUnavailable);
  EXPECT_THAT(second.error().what, HasSubstr(server->endpoint()));
  EXPECT_THAT(second.error().what, HasSubstr("Address already in use"));
  const Result<void> malformed = make(ZmqKind::kDealer)->connect("not an endpoint");
  ASSERT_FALSE(malformed);
  EXPECT_EQ(malformed.error().code, ErrorCode::kInvalidArgument);
}

TEST(ZmqSocket, SendingWithoutAConnectionFails) {
  EXPECT_FALSE(bound("tcp://127.0.0.1:0")->send(std::array<std::string_view, 2>{"unknown", "hello"}));
  const auto client = make(ZmqKind::kDealer, {.queues_unconnected = false});
  ASSERT_TRUE(client->connect("tcp://127.0.0.1:1"));
  EXPECT_FALSE(client->send("hello"));
}

TEST(ZmqSocket, PartsThatDoNotFitAreCountedAndDropped) {
  const auto server = bound("tcp://127.0.0.1:0");
  const auto client = make(ZmqKind::kDealer);
  ASSERT_TRUE(client->connect(server->endpoint()));
  ASSERT_TRUE(client->send(std::array<std::string_view, 5>{"1", "2", "3", "4", "5"}));
  ASSERT_TRUE(client->send("next"));
  std::array<ZmqPart, 2> parts;
  std::size_t num_parts = 0;
  while ((num_parts = server->receive(parts)) == 0) {
    pollfd waiting{server->fd(), POLLIN, 0};
    ASSERT_EQ(::poll(&waiting, 1, 10'000), 1);
  }
  EXPECT_EQ(num_parts, 6U);
  EXPECT_EQ(parts[1].bytes(), "1");
  EXPECT_EQ(wait_message(*server).back(), "next");
}

TEST(ZmqSocket, NoMessageIsMissedByAnOwnerThatSendsBetweenReceives) {
  const auto server = bound("tcp://127.0.0.1:0");
  const auto client = make(ZmqKind::kDealer);
  ASSERT_TRUE(client->connect(server->endpoint()));
  for (int i = 0; i < 2000; ++i) {
    ASSERT_TRUE(client->send("one"));
    const std::vector<std::string> message = wait_message(*server);
    ASSERT_EQ(message.size(), 2U);
    ASSERT_TRUE(server->send(std::array<std::string_view, 2>{message[0], "answer"}));
    // The answer may arrive while the client sends. Then send() consumes ZeroMQ's event.
    ASSERT_TRUE(client->send("two"));
    ASSERT_THAT(wait_message(*client), ElementsAre("answer"));
    ASSERT_EQ(wait_message(*server).back(), "two");
  }
}

TEST(ZmqSocket, EachSocketThatAContextAllowsMayHaveAMonitor) {
  for (const std::optional<ClusterKey>& key : {std::optional<ClusterKey>(), {ClusterKey(std::string(64, 'k'))}}) {
    const auto small = std::make_shared<ZmqContext>(2, key);
    std::vector<std::unique_ptr<ZmqSocket>> routers;
    for (int i = 0; i < 2; ++i) {
      routers.push_back(ZmqSocket::make(small, ZmqKind::kRouter).value());
      const Result<void> done = routers.back()->bind("tcp://127.0.0.1:0");  // on tcp:// a router has a monitor
      EXPECT_TRUE(done) << done.error().what;
    }
  }
}

TEST(ZmqSocket, AMonitorReportsConnectsAndDisconnects) {
  auto server = bound("tcp://127.0.0.1:0");
  const auto client = make(ZmqKind::kDealer);
  const auto monitor = client->make_monitor().value();
  const auto next_change = [&] {
    for (;;) {
      const ZmqSocket::Change change = monitor->next_change();
      pollfd waiting{monitor->fd(), POLLIN, 0};
      if (change != ZmqSocket::Change::kNone || ::poll(&waiting, 1, 10'000) != 1) return change;
    }
  };
  EXPECT_EQ(monitor->next_change(), ZmqSocket::Change::kNone);
  ASSERT_TRUE(client->connect(server->endpoint()));
  EXPECT_EQ(next_change(), ZmqSocket::Change::kConnected);
  server.reset();
  EXPECT_EQ(next_change(), ZmqSocket::Change::kDisconnected);
}

/// Waits for a change. Returns kNone after 10 s.
ZmqSocket::Change wait_change(ZmqSocket& monitor) {
  constexpr int kStepMs = 20;
  auto change = monitor.next_change();
  for (int ms = 0; change == ZmqSocket::Change::kNone && ms < 10'000; ms += kStepMs) {
    ::usleep(kStepMs * 1000);
    change = monitor.next_change();
  }
  return change;
}

/// Drops all packets that arrive at `port` on this process's accepted connections, like a firewall that has lost its
/// state of them.
void black_hole(std::uint16_t port) {
  sock_filter nothing{BPF_RET | BPF_K, 0, 0, 0};
  const sock_fprog filter{1, &nothing};
  for (int fd = 3; fd < 1024; ++fd) {
    if (local_address(fd).port != port || peer_address(fd).port == 0) continue;
    ASSERT_EQ(::setsockopt(fd, SOL_SOCKET, SO_ATTACH_FILTER, &filter, sizeof filter), 0);
  }
}

TEST(ZmqSocket, AConnectionWhosePacketsAreDroppedIsMadeAnewWithinSeconds) {
  const auto server = bound("tcp://127.0.0.1:0");
  const auto client = make(ZmqKind::kDealer);
  const auto changes = client->make_monitor().value();
  ASSERT_TRUE(client->connect(server->endpoint()));
  ASSERT_TRUE(client->send("before"));
  ASSERT_EQ(wait_message(*server).size(), 2u);
  EXPECT_EQ(wait_change(*changes), ZmqSocket::Change::kConnected);
  black_hole(address_of_endpoint(server->endpoint()).value().port);
  ASSERT_TRUE(client->send("lost"));
  EXPECT_EQ(wait_change(*changes), ZmqSocket::Change::kDisconnected);
  EXPECT_EQ(wait_change(*changes), ZmqSocket::Change::kConnected);
  ASSERT_TRUE(client->send("after"));
  EXPECT_EQ(wait_message(*server).at(1), "after");
}

TEST(ZmqSocket, AConnectionThatSaysNothingIsClosed) {
  const auto server = bound("tcp://127.0.0.1:0");
  const OwnedFd silent = connect_tcp(address_of_endpoint(server->endpoint()).value()).value();
  char greeting[64];
  EXPECT_GT(::recv(silent.get(), greeting, sizeof greeting, 0), 0);
  pollfd waiting{silent.get(), POLLIN, 0};
  ASSERT_EQ(::poll(&waiting, 1, 5000), 1);
  EXPECT_LE(::recv(silent.get(), greeting, sizeof greeting, 0), 0);
}

/// Returns the limit of file descriptors below which `num_free` are not open.
rlim_t limit_that_leaves(int num_free) {
  int fd = 0;
  for (; num_free > 0; ++fd) num_free -= ::fcntl(fd, F_GETFD) < 0 ? 1 : 0;
  return static_cast<rlim_t>(fd);
}

TEST(ZmqSocket, ARouterEndsNewConnectionsWhileFewDescriptorsAreLeft) {
  const auto server = bound("tcp://127.0.0.1:0");
  const auto client = make(ZmqKind::kDealer);
  ASSERT_TRUE(client->connect(server->endpoint()));
  ASSERT_TRUE(client->send("before"));
  const std::vector<std::string> before = wait_message(*server);
  ASSERT_EQ(before.size(), 2u);
  rlimit limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  const rlimit lower{limit_that_leaves(30), limit.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &lower), 0);
  std::vector<Result<OwnedFd>> unknown_peers;
  for (int i = 0; i < 16; ++i) {  // with the server's ends more than are left
    unknown_peers.push_back(connect_tcp(*address_of_endpoint(server->endpoint())));
    std::array<ZmqPart, 2> parts;
    pollfd waiting{server->fd(), POLLIN, 0};
    while (::poll(&waiting, 1, 20) == 1) server->receive(parts);  // until ZeroMQ has nothing more to report
  }
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
  const auto is_ended = [](const Result<OwnedFd>& unknown_peer) {
    constexpr timeval kWait{0, 500'000};  // shorter than ZeroMQ waits for a handshake
    ::setsockopt(unknown_peer->get(), SOL_SOCKET, SO_RCVTIMEO, &kWait, sizeof kWait);
    char bytes[64];
    ssize_t num_bytes = 1;
    while (num_bytes > 0) num_bytes = ::recv(unknown_peer->get(), bytes, sizeof bytes, 0);
    return num_bytes == 0 || errno == ECONNRESET;
  };
  for (const Result<OwnedFd>& unknown_peer : unknown_peers) ASSERT_TRUE(unknown_peer) << unknown_peer.error().what;
  EXPECT_FALSE(is_ended(unknown_peers.front()));
  EXPECT_TRUE(is_ended(unknown_peers.back()));
  ASSERT_TRUE(server->send(std::array<std::string_view, 2>{before[0], "after"}));
  EXPECT_THAT(wait_message(*client), ElementsAre("after"));
}

}  // namespace
}  // namespace kvferry::net
