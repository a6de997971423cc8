// Tests which answers `kvferry doctor --security` takes for those of a listener that demands the cluster key.
// Controllers are examined by tests/launch/doctor_test.py.
#include "launch/cli/doctor/key_probes.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "transport/base/net/tcp_socket.h"
#include "transport/make_transport.h"
#include "transport/tcp/messages.h"

namespace kvferry::cli {
namespace {

std::unique_ptr<Transport> data_port(std::optional<net::ClusterKey> key, net::Encrypt encrypt) {
  TcpOptions options;
  options.listen_host = "127.0.0.1";
  options.key = std::move(key);
  options.encrypt = encrypt;
  return make_tcp_transport(options).value();
}

net::HostPort address_of(const Transport& transport) {
  return decode<tcp::Address>(transport.address(), "address").value().endpoints.front();
}

/// A listener that answers every message with the same bytes and then ends the connection.
class Parrot {
 public:
  explicit Parrot(std::string answer) : answer_(std::move(answer)), thread_([this] { run(); }) {}
  ~Parrot() {
    is_stopping_ = true;
    thread_.join();
  }
  const net::HostPort& address() const { return listener_.address; }

 private:
  void run() {
    while (!is_stopping_) {
      pollfd waiting{listener_.socket.get(), POLLIN, 0};
      if (::poll(&waiting, 1, 10) <= 0) continue;
      const OwnedFd peer = net::accept_tcp(listener_.socket.get());
      if (!peer) continue;
      pollfd said{peer.get(), POLLIN, 0};
      ::poll(&said, 1, 10'000);
      std::string heard(1 << 16, '\0');
      ::recv(peer.get(), heard.data(), heard.size(), 0);  // else the end of the connection would discard the answer
      ::send(peer.get(), answer_.data(), answer_.size(), MSG_NOSIGNAL);
    }
  }

  const std::string answer_;
  const net::TcpListener listener_ = net::listen_tcp("127.0.0.1", 0).value();
  std::atomic<bool> is_stopping_{false};
  std::thread thread_;
};

TEST(KeyProbes, AWorkersTcpPortWithAKeyDemandsIt) {
  for (const net::Encrypt encrypt : {net::Encrypt::kNever, net::Encrypt::kBetweenHosts, net::Encrypt::kAlways}) {
    const auto port = data_port(net::ClusterKey(std::string(net::ClusterKey::kBytesMin, 'k')), encrypt);
    EXPECT_TRUE(asks_for_key(address_of(*port))) << static_cast<int>(encrypt);
  }
}

TEST(KeyProbes, AWorkersTcpPortWithoutAKeyDemandsNone) {
  const auto port = data_port(std::nullopt, net::Encrypt::kBetweenHosts);
  EXPECT_FALSE(asks_for_key(address_of(*port)));
}

TEST(KeyProbes, AListenerThatTakesNoConnectionsIsGivenUpSoon) {
  const net::TcpListener listener = net::listen_tcp("127.0.0.1", 0).value();
  ASSERT_EQ(::listen(listener.socket.get(), 0), 0);
  std::vector<OwnedFd> waiting;  // nobody accepts them, so the kernel ignores further attempts for minutes
  for (int i = 0; i < 4; ++i) waiting.push_back(net::begin_connect_tcp(listener.address).value());
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_FALSE(asks_for_key(listener.address));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(60));
}

TEST(KeyProbes, NoOtherAnswerIsTakenForTheDemandOfAKey) {
  const std::string refused("\x15\3\3\0\2\2\x2f", 7);
  EXPECT_TRUE(asks_for_key(Parrot(refused).address())) << "as a worker's TCP port answers";
  EXPECT_TRUE(asks_for_key(Parrot(std::string("\x15\3\1\0\2\2\x33", 7)).address())) << "as the specification says";
  const std::string others[] = {"",
                                std::string("\x15\3\3\0\2\2\x28", 7),  // handshake_failure, from any TLS server
                                std::string("\x15\3\3\0\2\2\x46", 7),  // protocol_version
                                std::string("\x16\3\3\0\x5a\2\0\0\x56\3\3", 11),  // the handshake goes on
                                refused + "more",
                                refused.substr(0, 6),
                                "HTTP/1.1 200 OK\r\n\r\n"};
  for (const std::string& other : others) EXPECT_FALSE(asks_for_key(Parrot(other).address())) << other;
}

TEST(KeyProbes, NobodyListensMeansNoDemand) { EXPECT_FALSE(asks_for_key({"127.0.0.1", 1})); }

}  // namespace
}  // namespace kvferry::cli
