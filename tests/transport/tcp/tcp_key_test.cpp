// Tests the TCP backend with a cluster key: what peers without the key can do (nothing), and what is visible on the
// wire.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>

#include "tests/transport/base/net/key_file.h"
#include "tests/transport/raw_socket.h"
#include "tests/transport/transport_fixture.h"
#include "transport/base/net/tcp_socket.h"
#include "transport/make_transport.h"

namespace kvferry {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr std::size_t kKeyBytes = net::ClusterKey::kBytesMin;
constexpr std::size_t kUnknownPeerBytesMax = 64;  // limit on the bytes that an unknown peer may get
constexpr std::uint64_t kMemoryBytes = 1 << 20;
constexpr auto kOneSecond = std::chrono::seconds(1);

std::unique_ptr<Transport> make_tcp(std::optional<net::ClusterKey> key, net::Encrypt encrypt) {
  TcpOptions options;
  options.listen_host = "127.0.0.1";
  options.key = std::move(key);
  options.encrypt = encrypt;
  return make_tcp_transport(options).value();
}
std::optional<net::ClusterKey> key_of(char letter) { return net::ClusterKey(std::string(kKeyBytes, letter)); }

/// Forwards the bytes of one connection to `port`, and keeps the bytes that the connecting side sent.
class Relay {
 public:
  explicit Relay(std::uint16_t port)
      : listener_(net::listen_tcp("127.0.0.1", 0).value()), thread_([this, port] { run(port); }) {}
  ~Relay() {
    is_stopping_ = true;
    thread_.join();
  }
  std::uint16_t port() const { return listener_.address.port; }
  std::string sent() const {
    const std::lock_guard lock(mutex_);
    return sent_;
  }
  std::string answered() const {
    const std::lock_guard lock(mutex_);
    return answered_;
  }

 private:
  void run(std::uint16_t port) {
    OwnedFd from;
    while (!from && !is_stopping_) from = net::accept_tcp(listener_.socket.get());
    const RawSocket to(RawSocket::connected_to(port));
    while (from && !is_stopping_) {
      if (is_readable(from.get()) && !pass_on(from.get(), to.fd(), sent_)) return;
      if (is_readable(to.fd()) && !pass_on(to.fd(), from.get(), answered_)) return;
    }
  }
  bool pass_on(int from, int to, std::string& keep) {
    std::string bytes(1 << 16, '\0');
    const ssize_t got = ::recv(from, bytes.data(), bytes.size(), 0);
    if (got <= 0) return false;
    bytes.resize(static_cast<std::size_t>(got));
    const std::lock_guard lock(mutex_);
    keep += bytes;
    for (std::size_t at = 0; at < bytes.size();) {
      const ssize_t sent = ::send(to, bytes.data() + at, bytes.size() - at, MSG_NOSIGNAL);
      if (sent > 0) at += static_cast<std::size_t>(sent);
      if (sent < 0 && errno != EAGAIN) return false;
    }
    return true;
  }

  const net::TcpListener listener_;
  std::atomic<bool> is_stopping_{false};
  mutable std::mutex mutex_;
  std::string sent_;
  std::string answered_;
  std::thread thread_;
};

class TcpWithKey : public ::testing::Test {
 protected:
  void SetUp() override { start(net::Encrypt::kAlways); }
  void start(net::Encrypt encrypt) {
    transport_ = make_tcp(key_of('k'), encrypt);
    address_ = decode<tcp::Address>(transport_->address(), "address").value();
    region_ = transport_->export_region(transport_->register_region(memory_.data(), memory_.size()).value()).value();
  }
  std::uint16_t port() const { return address_.endpoints.front().port; }

  Completion pull(Transport& from, const std::string& address) {
    const RegionId region = from.register_region(pulled_.data(), pulled_.size()).value();
    const PeerId peer = from.connect(address).value();
    EXPECT_TRUE(from.submit({peer, Direction::kPull, region, region_, {{0, 0, kMemoryBytes}}, "pulled"}));
    const std::vector<Completion> completions = wait_completions(from, 1);
    EXPECT_EQ(completions.size(), 1U);
    return completions.empty() ? Completion{} : completions[0];
  }
  void expect_alive() {
    const std::unique_ptr<Transport> member = make_tcp(key_of('k'), net::Encrypt::kAlways);
    const Completion done = pull(*member, transport_->address());
    EXPECT_EQ(done.code, ErrorCode::kOk) << done.what;
    EXPECT_TRUE(pulled_ == memory_);
  }
  std::string relayed_address(const Relay& relay) const {
    tcp::Address address = address_;
    address.endpoints = {{"127.0.0.1", relay.port()}};
    return encode(address);
  }
  /// Sends bytes on a new connection. Returns what the transport sent before it closed the connection, which it must do
  /// in time.
  std::string told(const std::string& bytes) {
    const auto began_at = std::chrono::steady_clock::now();
    RawSocket unknown_peer(RawSocket::connected_to(port()));
    ::send(unknown_peer.fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    std::string answer = unknown_peer.receive(1 << 16);
    EXPECT_LT(std::chrono::steady_clock::now() - began_at, kOneSecond + std::chrono::milliseconds(300));
    return answer;
  }

  std::vector<std::byte> memory_ = std::vector<std::byte>(kMemoryBytes, std::byte{'m'});
  std::vector<std::byte> pulled_ = std::vector<std::byte>(kMemoryBytes);
  std::unique_ptr<Transport> transport_;
  tcp::Address address_;
  std::string region_;
};

TEST_F(TcpWithKey, TellsUnknownPeersNothingAndClosesThemInTime) {
  const tcp::Hello hello{tcp::kProtocolVersion, address_.incarnation, address_.secret, "stolen", 1};
  std::string client_hello;
  {
    Relay relay(port());
    const std::unique_ptr<Transport> member = make_tcp(key_of('k'), net::Encrypt::kAlways);
    EXPECT_EQ(pull(*member, relayed_address(relay)).code, ErrorCode::kOk);
    client_hello = relay.sent().substr(0, 200);
  }
  const std::vector<std::string> attacks = {
      "",                                                                           // silence
      "GET / HTTP/1.1\r\nHost: somebody\r\n\r\n",                                   // a message of another protocol
      frame({.kind = tcp::MessageKind::kHello, .id = tcp::kMagic}, encode(hello)),  // the right secret, but no key
      client_hello.substr(0, 100),                                         // half a handshake, and then nothing
      std::string("\x16\x03\x01\x40\x00", 5) + std::string(100'000, 'x'),  // a long handshake
      std::string(1 << 20, '\xff'),
  };
  for (const std::string& attack : attacks)
    EXPECT_LE(told(attack).size(), kUnknownPeerBytesMax) << attack.substr(0, 20);
  EXPECT_THAT(transport_->describe(), HasSubstr(fmt::format("{} connections refused", attacks.size())));
  EXPECT_TRUE(transport_->poll_notifications().size() == 1) << "only the member's";
  expect_alive();
}

TEST_F(TcpWithKey, TakesNothingFromAReplayedSession) {
  std::string recorded;
  {
    Relay relay(port());
    const std::unique_ptr<Transport> member = make_tcp(key_of('k'), net::Encrypt::kAlways);
    EXPECT_EQ(pull(*member, relayed_address(relay)).code, ErrorCode::kOk);
    recorded = relay.sent();
  }
  EXPECT_EQ(wait_notifications(*transport_, 1).size(), 1U);
  // only an answer to the handshake, because the recorded bytes are valid only for their own connection
  EXPECT_LT(told(recorded).size(), 1000U);
  expect_alive();
  EXPECT_EQ(wait_notifications(*transport_, 1).size(), 1U);
}

TEST_F(TcpWithKey, RefusesAnotherKeyAndNone) {
  const std::unique_ptr<Transport> unknown_peer = make_tcp(key_of('x'), net::Encrypt::kAlways);
  const Completion done = pull(*unknown_peer, transport_->address());
  EXPECT_EQ(done.code, ErrorCode::kPeerLost);
  EXPECT_THAT(done.what, HasSubstr("no cluster key or a different one"));
  const std::unique_ptr<Transport> open = make_tcp({}, net::Encrypt::kAlways);
  EXPECT_THAT(open->connect(transport_->address()).error().what, HasSubstr("has a cluster key"));
  EXPECT_THAT(transport_->connect(open->address()).error().what, HasSubstr("has no cluster key"));
  // The handshake stays necessary even if the address says that there is no key.
  tcp::Address forged = address_;
  forged.has_key = false;
  EXPECT_EQ(pull(*open, encode(forged)).code, ErrorCode::kPeerLost);
  expect_alive();
}

TEST_F(TcpWithKey, ServesMembersWhileThousandsOfUnknownPeersConnect) {
  std::atomic<bool> is_over{false};
  std::thread unknown_peers([&] {
    for (int round = 0; round < 30 && !is_over; ++round) {
      std::vector<std::unique_ptr<RawSocket>> sockets;
      for (int count = 0; count < 100; ++count) {
        sockets.push_back(std::make_unique<RawSocket>(RawSocket::connected_to(port())));
        ::send(sockets.back()->fd(), "\x16\x03\x01", static_cast<std::size_t>(count % 4), MSG_NOSIGNAL);
      }
    }
  });
  expect_alive();
  unknown_peers.join();
  expect_alive();
}

TEST_F(TcpWithKey, ShowsTheWireWhatTheSettingSays) {
  const std::string shown(100, 'm');
  for (const net::Encrypt encrypt : {net::Encrypt::kAlways, net::Encrypt::kBetweenHosts, net::Encrypt::kNever}) {
    start(encrypt);
    Relay relay(port());
    const std::unique_ptr<Transport> member = make_tcp(key_of('k'), encrypt);
    EXPECT_EQ(pull(*member, relayed_address(relay)).code, ErrorCode::kOk);
    EXPECT_TRUE(pulled_ == memory_);
    EXPECT_EQ(relay.answered().find(shown) == std::string::npos, encrypt == net::Encrypt::kAlways);
  }
}

TEST_F(TcpWithKey, RefusesAConnectionInClearThatItWantsEncrypted) {
  const std::unique_ptr<Transport> open = make_tcp(key_of('k'), net::Encrypt::kNever);
  EXPECT_EQ(pull(*open, transport_->address()).code, ErrorCode::kPeerLost);
  start(net::Encrypt::kNever);
  expect_alive();  // only the side that connects may require more
}

TEST_F(TcpWithKey, ReplacesTheKeyStepByStepWithoutAFailedTransfer) {
  for (const bool is_holder_first : {true, false}) {
    net::KeyFile holder_file(::testing::TempDir(), net::kRotation[0]),
        reader_file(::testing::TempDir(), net::kRotation[0]);
    const std::optional<net::ClusterKey> holder_key = holder_file.read(), reader_key = reader_file.read();
    const auto holder = make_tcp(holder_key, net::Encrypt::kNever),
               reader = make_tcp(reader_key, net::Encrypt::kAlways);
    const std::string region =
        holder->export_region(holder->register_region(memory_.data(), memory_.size()).value()).value();
    const RegionId local = reader->register_region(pulled_.data(), pulled_.size()).value();
    const PeerId peer = reader->connect(holder->address()).value();
    int num_pulled = 0;
    const auto pull = [&] {
      ASSERT_TRUE(reader->submit({peer, Direction::kPull, local, region, {{0, 0, kMemoryBytes}}, ""}));
      const std::vector<Completion> done = wait_completions(*reader, 1);
      ASSERT_EQ(done.size(), 1U);
      ASSERT_EQ(done[0].code, ErrorCode::kOk) << done[0].what;
      ++num_pulled;
    };
    pull();
    for (std::size_t step = 1; step < net::kRotation.size(); ++step) {
      for (const bool is_holder : {is_holder_first, !is_holder_first}) {
        const net::ClusterKey& key = is_holder ? *holder_key : *reader_key;
        const std::uint64_t version = key.version();
        (is_holder ? holder_file : reader_file).write(net::kRotation[step]);
        ASSERT_TRUE(net::reaches([&] { return pull(), HasFatalFailure() || key.version() != version; }));
        if (HasFatalFailure()) return;
      }
      // The reader's idle link is made anew with the key in use before the former key is removed.
      std::this_thread::sleep_for(std::chrono::nanoseconds(2 * net::ClusterKey::kLookEveryNs));
    }
    EXPECT_GT(num_pulled, 6);
    EXPECT_TRUE(pulled_ == memory_);
    const auto revoked = make_tcp(net::ClusterKey(net::kOldKey), net::Encrypt::kAlways);
    const RegionId its_own = revoked->register_region(pulled_.data(), pulled_.size()).value();
    const PeerId unwilling = revoked->connect(holder->address()).value();
    ASSERT_TRUE(revoked->submit({unwilling, Direction::kPull, its_own, region, {{0, 0, kMemoryBytes}}, ""}));
    const std::vector<Completion> refused = wait_completions(*revoked, 1);
    ASSERT_EQ(refused.size(), 1U);
    EXPECT_EQ(refused[0].code, ErrorCode::kPeerLost);
  }
}

TEST_F(TcpWithKey, EndsConnectionsWhoseKeyIsRemoved) {
  for (const bool is_holder : {true, false}) {
    // The reader, which connects, uses a key that the follower's file has no longer at the end.
    net::KeyFile file(::testing::TempDir(), {net::kNewKey, net::kOldKey});
    const net::KeyFile of_fixed(::testing::TempDir(), {net::kOldKey, net::kNewKey});
    const auto follower = make_tcp(file.read(), net::Encrypt::kAlways);
    const auto fixed = make_tcp(is_holder ? of_fixed.read() : net::ClusterKey(net::kNewKey), net::Encrypt::kAlways);
    Transport &holder = is_holder ? *follower : *fixed, &reader = is_holder ? *fixed : *follower;
    const std::string region =
        holder.export_region(holder.register_region(memory_.data(), memory_.size()).value()).value();
    const RegionId local = reader.register_region(pulled_.data(), pulled_.size()).value();
    const PeerId peer = reader.connect(holder.address()).value();
    const auto pull = [&] {
      if (!reader.submit({peer, Direction::kPull, local, region, {{0, 0, kMemoryBytes}}, ""})) return false;
      const std::vector<Completion> done = wait_completions(reader, 1);
      return done.size() == 1 && done[0].code == ErrorCode::kOk;
    };
    EXPECT_TRUE(pull());
    file.write({is_holder ? net::kNewKey : net::kOldKey});
    EXPECT_TRUE(net::reaches([&] { return !pull(); })) << "the connection has outlived its key";
  }
}

}  // namespace
}  // namespace kvferry
