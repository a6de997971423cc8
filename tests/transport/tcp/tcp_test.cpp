// Tests what only the TCP backend has: unknown peers at its port, peers that break the rules of its messages, many
// connections.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "tests/transport/base/net/ipv6.h"
#include "tests/transport/raw_socket.h"
#include "tests/transport/transport_fixture.h"
#include "transport/base/checksum.h"
#include "transport/completion_queue.h"
#include "transport/make_transport.h"
#include "transport/region_descriptor.h"
#include "transport/tcp/messages.h"

namespace kvferry {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr std::uint64_t kTcpBytes = std::uint64_t{4} << 20;

std::unique_ptr<Transport> make_tcp(TimeNs silence_ns = 2 * kSecond, std::uint32_t connections = 4,
                                    std::uint64_t segment_bytes = 512 << 10, const char* listen_host = "127.0.0.1") {
  TcpOptions options;
  options.listen_host = listen_host;
  options.silence_ns = silence_ns;
  options.connections = connections;
  options.segment_bytes = segment_bytes;
  return make_tcp_transport(options).value();
}

/// A transport with memory. Another transport checks that it still works.
class TcpTarget : public ::testing::Test {
 protected:
  void SetUp() override {
    fill(memory_, 1);
    transport_ = make_tcp();
    address_ = decode<tcp::Address>(transport_->address(), "address").value();
    region_ = transport_->register_region(memory_.data(), memory_.size()).value();
  }
  std::string hello() const {
    const tcp::Hello said{tcp::kProtocolVersion, address_.incarnation, address_.secret, "a test", 77};
    return frame({.kind = tcp::MessageKind::kHello, .id = tcp::kMagic}, encode(said));
  }
  std::uint16_t port() const { return address_.endpoints.front().port; }
  /// Sends bytes on a new connection. Returns what the transport sent before it closed the connection.
  std::string sent_away(const std::string& bytes) {
    RawSocket unknown_peer(RawSocket::connected_to(port()));
    unknown_peer.send(bytes);
    std::string said = unknown_peer.receive(1 << 16);
    EXPECT_LE(said.size(), 64U);
    return said;
  }
  void expect_alive(const char* listen_host = "127.0.0.1") {
    const std::unique_ptr<Transport> other = make_tcp(2 * kSecond, 4, 512 << 10, listen_host);
    std::vector<std::byte> memory(kTcpBytes);
    const RegionId region = other->register_region(memory.data(), memory.size()).value();
    const PeerId peer = other->connect(transport_->address()).value();
    const std::string remote = transport_->export_region(region_).value();
    const TransferId id = other->submit({peer, Direction::kPull, region, remote, {{0, 0, kTcpBytes}}, ""}).value();
    EXPECT_THAT(wait_completions(*other, 1), ElementsAre(Completion{id, ErrorCode::kOk, ""}));
    EXPECT_TRUE(memory == memory_);
  }

  std::vector<std::byte> memory_ = std::vector<std::byte>(kTcpBytes);
  std::unique_ptr<Transport> transport_;
  tcp::Address address_;
  RegionId region_;
};

TEST_F(TcpTarget, IsReachedOverIpv6) {
  SKIP_WITHOUT_IPV6();
  for (const char* listen_host : {"::1", "::", ""}) {
    transport_ = make_tcp(2 * kSecond, 4, 512 << 10, listen_host);
    region_ = transport_->register_region(memory_.data(), memory_.size()).value();
    expect_alive("::1");
  }
}

TEST_F(TcpTarget, SendsUnknownPeersAwayWithOneSentence) {
  const auto hello_of = [](const tcp::Hello& said) {
    return frame({.kind = tcp::MessageKind::kHello, .id = tcp::kMagic}, encode(said));
  };
  tcp::Hello said{tcp::kProtocolVersion, address_.incarnation, std::string(16, 'x'), "a test", 1};
  EXPECT_THAT(sent_away(hello_of(said)), HasSubstr("secret"));
  said.secret = address_.secret;
  ++said.to_incarnation;
  EXPECT_THAT(sent_away(hello_of(said)), HasSubstr("address is outdated"));
  said.to_incarnation = address_.incarnation;
  ++said.protocol_version;
  EXPECT_THAT(sent_away(hello_of(said)), HasSubstr("protocol"));
  EXPECT_THAT(sent_away("GET / HTTP/1.1\r\nHost: somebody\r\n\r\n\r\n\r\n\r\n"), HasSubstr("no valid handshake"));
  EXPECT_THAT(sent_away(frame({.kind = tcp::MessageKind::kPull, .id = 1})), HasSubstr("no valid handshake"));
  EXPECT_THAT(sent_away(frame({.kind = tcp::MessageKind::kHello, .id = tcp::kMagic}, "garbage")),
              HasSubstr("no valid handshake"));
  expect_alive();
}

TEST_F(TcpTarget, OutlivesUnknownPeersThatHangUpBeforeTheyAreSentAway) {
  const linger reset{1, 0};
  for (int count = 0; count < 20; ++count) {
    RawSocket unknown_peer(RawSocket::connected_to(port()));
    ::setsockopt(unknown_peer.fd(), SOL_SOCKET, SO_LINGER, &reset, sizeof(reset));
    if (count % 2 == 0) unknown_peer.send(std::string(100, 'x'));
  }
  expect_alive();
}

TEST_F(TcpTarget, SendsAwayWhoDoesNotFinishTheHello) {
  transport_ = make_tcp(200 * kMillisecond);
  address_ = decode<tcp::Address>(transport_->address(), "address").value();
  EXPECT_THAT(sent_away(hello().substr(0, 60)), HasSubstr("in time"));
  EXPECT_THAT(sent_away(""), HasSubstr("in time"));
}

TEST_F(TcpTarget, EndsLinksThatBreakTheRules) {
  const auto with_entry = [](tcp::MessageHeader header, tcp::Entry entry) {
    header.num_entries = 1;
    std::string bytes;
    tcp::append_bytes(bytes, &header, sizeof(header));
    tcp::append_bytes(bytes, &entry, sizeof(entry));
    return bytes;
  };
  const tcp::MessageHeader push{.kind = tcp::MessageKind::kPush, .id = 1, .region = region_.value};
  const std::vector<std::string> bad = {
      frame({.kind = tcp::MessageKind{99}}),
      frame({.kind = tcp::MessageKind::kAnswer}),
      frame({.kind = tcp::MessageKind::kPing, .payload_bytes = 1}),
      frame({.kind = tcp::MessageKind::kPing, .priority = 3}),
      frame({.kind = tcp::MessageKind::kPush, .num_entries = ~0U}),
      frame({.kind = tcp::MessageKind::kPush, .payload_bytes = ~0U}),
      frame({.kind = tcp::MessageKind::kPull, .id = 1}),
      with_entry(push, {0, 8, 0}),
      with_entry(push, {~std::uint64_t{0}, 8, 0}),
      with_entry({.kind = tcp::MessageKind::kPull, .id = 1}, {0, ~0U, 0}),
      frame({.kind = tcp::MessageKind::kPush, .flags = tcp::kFinal, .id = 1, .number = 1}) +
          frame({.kind = tcp::MessageKind::kPush, .flags = tcp::kFinal, .id = 1, .number = 1}),
  };
  for (std::size_t index = 0; index < bad.size(); ++index) {
    RawSocket peer(RawSocket::connected_to(port()));
    peer.send(hello());
    EXPECT_EQ(peer.receive_frame().header.kind, tcp::MessageKind::kWelcome);
    peer.send(bad[index]);
    EXPECT_EQ(peer.receive(1), "") << "case " << index;
  }
  // A message whose text exceeds the limit ends the connection at once.
  std::string long_text = frame({.kind = tcp::MessageKind::kNotify});
  const std::uint32_t text_bytes = ~0U;
  std::memcpy(long_text.data() + offsetof(tcp::MessageHeader, text_bytes), &text_bytes, sizeof(text_bytes));
  RawSocket peer(RawSocket::connected_to(port()));
  peer.send(hello());
  EXPECT_EQ(peer.receive_frame().header.kind, tcp::MessageKind::kWelcome);
  peer.send(long_text);
  EXPECT_EQ(peer.receive(1), "");
  EXPECT_THAT(transport_->poll_notifications(), IsEmpty());
  expect_alive();
}

/// The end of a push arrives on one connection of a link, while another connection is in the middle of the push's
/// payload.
TEST_F(TcpTarget, EndsALinkWhosePushEndsUnderAnotherConnection) {
  for (const std::uint32_t num_segments : {0U, 1U}) {
    for (const std::uint8_t flags : {std::uint8_t{0}, std::uint8_t{tcp::kChecksums}}) {
      RawSocket first(RawSocket::connected_to(port()));
      RawSocket second(RawSocket::connected_to(port()));
      for (RawSocket* const lane : {&first, &second}) {
        lane->send(hello());
        EXPECT_EQ(lane->receive_frame().header.kind, tcp::MessageKind::kWelcome);
      }
      const auto segment = [&](std::uint64_t offset) {
        const tcp::MessageHeader header{.kind = tcp::MessageKind::kPush,
                                        .flags = flags,
                                        .num_entries = 1,
                                        .id = 5,
                                        .region = region_.value,
                                        .payload_bytes = 64};
        const tcp::Entry entry{offset, 64, tcp::kEndsRange};
        std::string bytes;
        tcp::append_bytes(bytes, &header, sizeof(header));
        tcp::append_bytes(bytes, &entry, sizeof(entry));
        if (flags != 0) bytes += std::string(sizeof(std::uint64_t), 'c');
        return bytes;
      };
      // The answer to the ping shows that the transport has begun to read the segments.
      if (num_segments == 1) first.send(segment(0) + std::string(64, 'a'));
      first.send(frame({.kind = tcp::MessageKind::kPing}));
      EXPECT_EQ(first.receive_frame().header.kind, tcp::MessageKind::kPong);
      second.send(frame({.kind = tcp::MessageKind::kPing}) + segment(64) + std::string(10, 'b'));
      EXPECT_EQ(second.receive_frame().header.kind, tcp::MessageKind::kPong);
      first.send(frame({.kind = tcp::MessageKind::kPush, .flags = tcp::kFinal, .id = 5, .number = num_segments}));
      EXPECT_EQ(first.receive(1), "") << "the link goes on with " << num_segments << " segments";
      ::send(second.fd(), std::string(54, 'b').data(), 54, MSG_NOSIGNAL);
      EXPECT_EQ(second.receive(1), "");
    }
  }
  expect_alive();
}

TEST_F(TcpTarget, NamesTheRangeThatChangedOnTheWayAndAnnouncesNothing) {
  RawSocket peer(RawSocket::connected_to(port()));
  peer.send(hello());
  EXPECT_EQ(peer.receive_frame().header.kind, tcp::MessageKind::kWelcome);
  const std::string payload(64, 'p');
  const std::uint64_t checksum = chunk_checksum(std::as_bytes(std::span(payload)));
  tcp::MessageHeader header{.kind = tcp::MessageKind::kPush,
                            .flags = tcp::kFinal | tcp::kChecksums,
                            .num_entries = 1,
                            .id = 9,
                            .region = region_.value,
                            .number = 1,
                            .text_bytes = 4,
                            .payload_bytes = 64};
  const tcp::Entry entry{128, 64, 5 | tcp::kEndsRange};
  for (const bool is_changed : {true, false}) {
    std::string bytes;
    tcp::append_bytes(bytes, &header, sizeof(header));
    tcp::append_bytes(bytes, &entry, sizeof(entry));
    tcp::append_bytes(bytes, &checksum, sizeof(checksum));
    bytes += "note" + payload;
    if (is_changed) bytes.back() = 'q';
    peer.send(bytes);
    const RawSocket::Frame answer = peer.receive_frame();
    EXPECT_EQ(answer.header.kind, tcp::MessageKind::kAnswer);
    EXPECT_EQ(answer.header.id, 9U);
    EXPECT_EQ(static_cast<ErrorCode>(answer.header.code), is_changed ? ErrorCode::kCorrupt : ErrorCode::kOk);
    EXPECT_EQ(transport_->poll_notifications().size(), is_changed ? 0U : 1U);
    if (is_changed) {
      EXPECT_THAT(decode<tcp::AnswerBody>(answer.rest, "answer").value().corrupt_ranges, ElementsAre(5U));
    }
  }
}

TEST_F(TcpTarget, RefusesNotificationsThatItCannotKeep) {
  RawSocket peer(RawSocket::connected_to(port()));
  peer.send(hello());
  EXPECT_EQ(peer.receive_frame().header.kind, tcp::MessageKind::kWelcome);
  const std::string pulled = frame({.kind = tcp::MessageKind::kNotify, .id = 7}, "note");
  const std::string pushed = frame({.kind = tcp::MessageKind::kPush, .flags = tcp::kFinal, .id = 8}, "note");
  constexpr std::size_t kAtOnce = 256;
  std::string many;
  for (std::size_t index = 0; index < kAtOnce; ++index) many += pulled;
  for (std::size_t sent = 0; sent < CompletionQueue::kNotificationsMax; sent += kAtOnce) {
    peer.send(many);
    for (std::size_t index = 0; index < kAtOnce; ++index) ASSERT_EQ(peer.receive_frame().header.code, 0);
  }
  for (const std::string& one : {pulled, pushed}) {
    peer.send(one);
    const RawSocket::Frame answer = peer.receive_frame();
    EXPECT_EQ(answer.header.id, one == pulled ? 7U : 8U);
    EXPECT_EQ(static_cast<ErrorCode>(answer.header.code), ErrorCode::kRefused);
    EXPECT_THAT(decode<tcp::AnswerBody>(answer.rest, "answer").value().what, HasSubstr("65536 unread notifications"));
  }
  EXPECT_EQ(transport_->poll_notifications().size(), CompletionQueue::kNotificationsMax);
  peer.send(pulled);
  EXPECT_EQ(peer.receive_frame().header.code, 0);
  expect_alive();
}

/// The test itself plays the target.
class TcpInitiator : public ::testing::Test {
 protected:
  void SetUp() override {
    listener_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in any{};
    any.sin_family = AF_INET;
    any.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t bytes = sizeof(any);
    ASSERT_EQ(::bind(listener_, reinterpret_cast<const sockaddr*>(&any), sizeof(any)), 0);
    ASSERT_EQ(::listen(listener_, 8), 0);
    ::getsockname(listener_, reinterpret_cast<sockaddr*>(&any), &bytes);
    transport_ = make_tcp(kSecond, 1);
    region_ = transport_->register_region(memory_.data(), memory_.size()).value();
    peer_ = transport_
                ->connect(encode(tcp::Address{
                    tcp::kProtocolVersion, 1234, std::string(16, 's'), {{"127.0.0.1", ntohs(any.sin_port)}}}))
                .value();
    target_ = std::make_unique<RawSocket>(::accept(listener_, nullptr, nullptr));
    EXPECT_EQ(target_->receive_frame().header.kind, tcp::MessageKind::kHello);
  }
  void TearDown() override { ::close(listener_); }

  PagedTransfer transfer(Direction direction, std::uint64_t bytes) const {
    return {peer_,           direction, region_, encode(RegionDescriptor{1234, 0, kTcpBytes * 16, "", 1, 0}),
            {{0, 0, bytes}}, ""};
  }
  void expect_end(TransferId id, ErrorCode code, const std::string& what) {
    const std::vector<Completion> completions = wait_completions(*transport_, 1);
    ASSERT_EQ(completions.size(), 1U);
    EXPECT_EQ(completions[0].id, id);
    EXPECT_EQ(completions[0].code, code);
    EXPECT_THAT(completions[0].what, HasSubstr(what));
  }

  int listener_ = -1;
  std::vector<std::byte> memory_ = std::vector<std::byte>(kTcpBytes * 16);
  std::unique_ptr<Transport> transport_;
  RegionId region_;
  PeerId peer_;
  std::unique_ptr<RawSocket> target_;
};

TEST_F(TcpInitiator, LosesAPeerThatStopsReading) {
  target_->send(frame({.kind = tcp::MessageKind::kWelcome}));
  const TransferId id = transport_->submit(transfer(Direction::kPush, kTcpBytes * 16)).value();
  expect_end(id, ErrorCode::kPeerLost, "was silent for");
}

TEST_F(TcpInitiator, LosesAPeerThatNeverAnswersTheHello) {
  const TransferId id = transport_->submit(transfer(Direction::kPull, 100)).value();
  expect_end(id, ErrorCode::kPeerLost, "was silent for");
}

TEST_F(TcpInitiator, LosesAPeerThatNeverAnswersTheHelloAlsoIfTransfersAreCancelledAndSubmittedAgain) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(5);
  ErrorCode code = ErrorCode::kCancelled;
  while (code == ErrorCode::kCancelled && std::chrono::steady_clock::now() < deadline) {
    const TransferId id = transport_->submit(transfer(Direction::kPull, 100)).value();
    transport_->wait(200 * kMillisecond);
    transport_->cancel(id);
    const std::vector<Completion> completions = wait_completions(*transport_, 1);
    ASSERT_EQ(completions.size(), 1U);
    code = completions[0].code;
  }
  EXPECT_EQ(code, ErrorCode::kPeerLost);
}

TEST_F(TcpInitiator, KeepsAPeerThatIsSlowButAlive) {
  target_->send(frame({.kind = tcp::MessageKind::kWelcome}));
  const TransferId id = transport_->submit(transfer(Direction::kPull, 100)).value();
  EXPECT_EQ(target_->receive_frame().header.kind, tcp::MessageKind::kPull);
  for (int round = 0; round < 6; ++round) {  // longer than silence_ns in total
    EXPECT_EQ(target_->receive_frame().header.kind, tcp::MessageKind::kPing);
    target_->send(frame({.kind = tcp::MessageKind::kPong}));
  }
  target_->send(frame({.kind = tcp::MessageKind::kData, .number = 1, .payload_bytes = 100}) + std::string(100, 'd'));
  EXPECT_THAT(wait_completions(*transport_, 1), ElementsAre(Completion{id, ErrorCode::kOk, ""}));
  EXPECT_EQ(memory_[99], std::byte{'d'});
}

TEST_F(TcpInitiator, NamesTheRangeThatChangedOnTheWay) {
  target_->send(frame({.kind = tcp::MessageKind::kWelcome}));
  PagedTransfer pull = transfer(Direction::kPull, 100);
  const std::string right(100, 'd');
  pull.checksums = {chunk_checksum(std::as_bytes(std::span(right)))};
  const TransferId id = transport_->submit(pull).value();
  EXPECT_EQ(target_->receive_frame().header.number, 1U);
  target_->send(frame({.kind = tcp::MessageKind::kData, .number = 1, .payload_bytes = 100}) + std::string(99, 'd') +
                'e');
  const std::vector<Completion> completions = wait_completions(*transport_, 1);
  ASSERT_EQ(completions.size(), 1U);
  EXPECT_EQ(completions[0].id, id);
  EXPECT_EQ(completions[0].code, ErrorCode::kCorrupt);
  EXPECT_THAT(completions[0].corrupt_ranges, ElementsAre(0U));
}

TEST_F(TcpInitiator, LearnsThatTheNotificationOfAPullWasRefused) {
  target_->send(frame({.kind = tcp::MessageKind::kWelcome}));
  const auto answered = [&](ErrorCode code) {
    PagedTransfer pull = transfer(Direction::kPull, 100);
    pull.notification = "note";
    const TransferId id = transport_->submit(pull).value();
    const std::uint32_t number = target_->receive_frame().header.number;
    target_->send(frame({.kind = tcp::MessageKind::kData, .id = id.value, .number = number, .payload_bytes = 100}) +
                  std::string(100, 'd'));
    EXPECT_EQ(target_->receive_frame().header.kind, tcp::MessageKind::kNotify);
    target_->send(frame({.kind = tcp::MessageKind::kAnswer, .code = static_cast<std::uint8_t>(code), .id = id.value},
                        encode(tcp::AnswerBody{"no room", {}})));
    return id;
  };
  expect_end(answered(ErrorCode::kRefused), ErrorCode::kRefused, "no room");
  expect_end(answered(ErrorCode::kCorrupt), ErrorCode::kPeerLost, "answered a pull's notification");
}

TEST_F(TcpInitiator, LosesAPeerThatSendsWhatNobodyAskedFor) {
  target_->send(frame({.kind = tcp::MessageKind::kWelcome}));
  const TransferId id = transport_->submit(transfer(Direction::kPull, 100)).value();
  EXPECT_EQ(target_->receive_frame().header.number, 1U);
  target_->send(frame({.kind = tcp::MessageKind::kData, .number = 1, .payload_bytes = 101}));
  expect_end(id, ErrorCode::kPeerLost, "101 bytes");
}

TEST(TcpTransport, ManyConnectionsShareATransferInSmallSegments) {
  const std::unique_ptr<Transport> here = make_tcp(2 * kSecond, 8, 4096);
  const std::unique_ptr<Transport> there = make_tcp(2 * kSecond, 8, 4096);
  std::vector<std::byte> mine(kTcpBytes);
  std::vector<std::byte> theirs(kTcpBytes);
  const RegionId region = here->register_region(mine.data(), kTcpBytes).value();
  const std::string remote = there->export_region(there->register_region(theirs.data(), kTcpBytes).value()).value();
  const PeerId peer = here->connect(there->address()).value();
  for (const Direction direction : {Direction::kPull, Direction::kPush}) {
    fill(mine, 3);
    fill(theirs, 4);
    std::vector<std::byte>& to = direction == Direction::kPull ? mine : theirs;
    const std::vector<std::byte>& from = direction == Direction::kPull ? theirs : mine;
    std::vector<std::byte> expected = to;
    PagedTransfer transfer{peer, direction, region, remote, random_ranges(5, 400, 10'000), "all of it"};
    for (const CopyRange& range : transfer.ranges) {
      const bool is_pull = direction == Direction::kPull;
      const std::byte* source = from.data() + (is_pull ? range.remote_offset : range.local_offset);
      std::copy_n(source, range.bytes, expected.data() + (is_pull ? range.local_offset : range.remote_offset));
      transfer.checksums.push_back(chunk_checksum({source, range.bytes}));
    }
    const TransferId id = here->submit(transfer).value();
    EXPECT_EQ(wait_notifications(*there, 1).size(), 1U);
    EXPECT_THAT(wait_completions(*here, 1), ElementsAre(Completion{id, ErrorCode::kOk, ""}));
    EXPECT_TRUE(to == expected);
  }
}

TEST(TcpTransport, OptionsThatMakeNoSenseAreRefused) {
  const auto code_of = [](auto change) {
    TcpOptions options;
    change(options);
    const auto made = make_tcp_transport(options);
    return made ? ErrorCode::kOk : made.error().code;
  };
  EXPECT_EQ(code_of([](TcpOptions& options) { options.connections = 0; }), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code_of([](TcpOptions& options) { options.segment_bytes = 1; }), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code_of([](TcpOptions& options) { options.silence_ns = 0; }), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code_of([](TcpOptions& options) { options.listen_host = "192.0.2.1"; }), ErrorCode::kUnavailable);
}

TEST(TcpOptions, ANumberOutOfItsRangeIsNamedWithTheRange) {
  const auto refusal = [](const auto& change) {
    TcpOptions options;
    change(options);
    return make_tcp_transport(options).error().what;
  };
  EXPECT_EQ(refusal([](TcpOptions& options) { options.local_connections = 65; }),
            "option local_connections of the TCP backend is 65; allowed: 1 to 64");
  EXPECT_EQ(refusal([](TcpOptions& options) { options.segment_bytes = std::uint64_t{1} << 40; }),
            "option segment_bytes of the TCP backend is 1099511627776; allowed: 4096 to 67108864");
  EXPECT_EQ(refusal([](TcpOptions& options) { options.spin_ns = -1; }),
            "option spin_ns of the TCP backend is -1; allowed: 0 and more");
}

}  // namespace
}  // namespace kvferry
