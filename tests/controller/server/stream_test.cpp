// Tests the stream with peers that are not our client: partial messages, floods, wrong lengths, and files at a socket's
// path.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <fstream>
#include <random>

#include "controller/protocol/stream_socket.h"
#include "controller/protocol/wire.h"
#include "tests/controller/live.h"

namespace kvferry::controller {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::string framed(std::string_view message) {
  std::string bytes;
  append_frame(bytes, message);
  return bytes;
}

/// A plain socket with which a test can send any bytes.
class RawStream {
 public:
  explicit RawStream(const std::string& endpoint) : socket_(begin_connect(stream_address(endpoint)).value()) {
    wait(POLLOUT);
  }
  void send(std::string_view bytes) {
    while (!bytes.empty()) {
      const ssize_t sent = ::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent < 0 && errno != EAGAIN) throw std::runtime_error("the connection is over");
      if (sent < 0) wait(POLLOUT);
      bytes.remove_prefix(static_cast<std::size_t>(std::max<ssize_t>(sent, 0)));
    }
  }
  /// Returns false if send() would block now.
  bool try_send(std::string_view bytes) {
    return ::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT) ==
           static_cast<ssize_t>(bytes.size());
  }
  std::optional<wire::FromController> receive() {
    for (;;) {
      if (in_.size() >= kLengthBytes && in_.size() - kLengthBytes >= frame_length(in_)) {
        const std::string message = in_.substr(kLengthBytes, frame_length(in_));
        in_.erase(0, kLengthBytes + message.size());
        return wire::parse<wire::FromController>(message).value();
      }
      if (!read_some()) return std::nullopt;
    }
  }
  bool has_ended() {
    while (read_some()) {
    }
    return true;
  }

 private:
  void wait(short events) {
    pollfd item{socket_.get(), events, 0};
    if (::poll(&item, 1, static_cast<int>(kDeadlineMs)) != 1) throw std::runtime_error("nothing happens");
  }
  bool read_some() {
    wait(POLLIN);
    char bytes[4096];
    const ssize_t num_read = ::recv(socket_.get(), bytes, sizeof(bytes), 0);
    if (num_read > 0) in_.append(bytes, static_cast<std::size_t>(num_read));
    return num_read > 0;
  }

  OwnedFd socket_;
  std::string in_;
};

class StreamPeers : public ::testing::Test {
 protected:
  LiveServer server_{"stream://127.0.0.1:0"};
  LiveNode asker_{server_.endpoint(), node_info("asker")};
  void SetUp() override { ASSERT_TRUE(asker_.wait_for<Registered>()); }
  bool is_served() {
    const std::size_t num_replies = asker_.count<LookupReply>();
    asker_.who_has(ask_for(0, 1));
    return asker_.count<LookupReply>() > num_replies;
  }
};

TEST_F(StreamPeers, AMessageMayComeInPiecesAndManyInOne) {
  const std::string question = framed(encode(wire::StatusRequest{}));
  RawStream pieces(server_.endpoint());
  for (const char byte : question) {
    pieces.send({&byte, 1});
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  EXPECT_TRUE(std::holds_alternative<wire::StatusReply>(pieces.receive().value()));
  std::string many;
  for (int i = 0; i < 5000; ++i) many += question;
  std::thread sender([&] { pieces.send(many); });
  for (int i = 0; i < 5000; ++i) ASSERT_TRUE(std::holds_alternative<wire::StatusReply>(pieces.receive().value())) << i;
  sender.join();
}

TEST_F(StreamPeers, ALongMessageArrivesWhole) {
  RawStream peer(server_.endpoint());
  peer.send(framed(encode(wire::Hello{.node = node_info("raw")})));
  ASSERT_TRUE(std::holds_alternative<wire::Registered>(peer.receive().value()));
  wire::Publish publish{.incarnation = 1, .begins_snapshot = true, .full = {keys_of(0, 200'000)}};
  const std::string bytes = framed(encode(publish));
  ASSERT_GT(bytes.size(), std::size_t{3} << 20);
  peer.send(bytes);
  EXPECT_TRUE(asker_.wait_to_see(ask_for(199'990, 200'001), {"raw:10"}));
}

TEST_F(StreamPeers, ALengthBeyondTheLimitIsRefusedInASentenceAndEndsTheConnectionAlone) {
  RawStream peer(server_.endpoint());
  std::string lie("\xff\xff\xff\xff", 4);
  lie.append(100'000, 'x');
  peer.send(lie);
  const auto answer = peer.receive();
  ASSERT_TRUE(answer && std::holds_alternative<wire::Refused>(*answer));
  EXPECT_THAT(std::get<wire::Refused>(*answer).reason, HasSubstr("4294967295 bytes; at most 4194304"));
  EXPECT_TRUE(peer.has_ended());
  EXPECT_TRUE(is_served());
  EXPECT_EQ(server_.status().counters.messages_malformed, 1U);
}

TEST_F(StreamPeers, AClaimThatIsNeverMadeGoodHoldsUpNobody) {
  std::vector<std::unique_ptr<RawStream>> peers;
  for (int i = 0; i < 50; ++i) {
    peers.push_back(std::make_unique<RawStream>(server_.endpoint()));
    peers.back()->send(std::string_view("\x00\x00\x40\x00half a message", 18));
  }
  EXPECT_TRUE(is_served());
}

TEST_F(StreamPeers, AFloodOfGarbageIsCountedAndChangesNothing) {
  RawStream peer(server_.endpoint());
  std::mt19937 random(3);
  for (int i = 0; i < 5000; ++i) {
    std::string bytes(random() % 100, '\0');
    for (char& byte : bytes) byte = static_cast<char>(random());
    peer.send(framed(bytes));
  }
  peer.send(framed(encode(wire::StatusRequest{})));
  const auto reply = std::get<wire::StatusReply>(peer.receive().value());
  EXPECT_GT(reply.status.counters.messages_malformed, 4000U);
  EXPECT_TRUE(is_served());
}

TEST_F(StreamPeers, APeerThatNeverReadsHoldsUpNobodyAndItsAnswersAreDropped) {
  RawStream peer(server_.endpoint());
  NodeInfo wordy = node_info(std::string(250, 'x'));  // so that the answer is long
  wordy.endpoint = std::string(500, 'y');
  LiveNode node(server_.endpoint(), wordy);
  ASSERT_TRUE(node.wait_for<Registered>());
  std::string questions;
  for (int i = 0; i < 1000; ++i) questions += framed(encode(wire::StatusRequest{}));
  EXPECT_TRUE(asker_.wait_until([&] {
    peer.try_send(questions);  // if a part of a message is lost, the rest is garbage, which serves the test as well
    return server_.status().counters.replies_dropped > 0;
  }));
  EXPECT_TRUE(is_served());
}

TEST_F(StreamPeers, ANodeWhoseConnectionEndsStaysUntilItsLeaseDoes) {
  {
    RawStream peer(server_.endpoint());
    peer.send(framed(encode(wire::Hello{.node = node_info("raw")})));
    ASSERT_TRUE(std::holds_alternative<wire::Registered>(peer.receive().value()));
    peer.send(framed(encode(wire::Publish{.incarnation = 1, .begins_snapshot = true, .full = {keys_of(0, 2)}})));
  }
  EXPECT_TRUE(asker_.wait_to_see(ask_for(0, 2), {"raw:2"}));
  RawStream again(server_.endpoint());
  again.send(framed(encode(wire::Heartbeat{.incarnation = 1, .next_sequence = 1})));
  EXPECT_TRUE(std::holds_alternative<wire::Unregistered>(again.receive().value())) << "on another connection";
}

TEST(ControllerStream, ABrokenConnectionIsSeenAtOnceAndMadeAgain) {
  auto server = std::make_unique<LiveServer>("stream://127.0.0.1:0");
  const std::string endpoint = server->endpoint();
  // no heartbeats, so that only the broken connection can show the node that the server is gone
  LiveNode node(endpoint, node_info("a"), /*heartbeat_ms=*/10 * kDeadlineMs);
  ASSERT_TRUE(node.wait_for<Registered>());
  server.reset();
  ASSERT_TRUE(node.wait_for<Lost>());
  EXPECT_THAT(node.last<Lost>().reason, HasSubstr("broke"));
  server = std::make_unique<LiveServer>(endpoint);
  EXPECT_TRUE(node.wait_for<Registered>(2));
}

TEST(ControllerStream, NamesAndBothInternetProtocolsWork) {
  LiveServer server("stream://localhost:0");
  const std::string port = server.endpoint().substr(server.endpoint().rfind(':'));
  LiveNode named("stream://localhost" + port, node_info("a"));
  EXPECT_TRUE(named.wait_for<Registered>());
  const auto everywhere =
      Server::bind({.bind = "tcp://127.0.0.1:0", .stream = "stream://*:0", .directory = {}}, steady_clock());
  ASSERT_TRUE(everywhere) << everywhere.error().what;
  const auto v6 =
      Server::bind({.bind = "tcp://127.0.0.1:0", .stream = "stream://[::1]:0", .directory = {}}, steady_clock());
  if (!v6) GTEST_SKIP() << "this host has no IPv6: " << v6.error().what;
  EXPECT_THAT((*v6)->stream_endpoint(), HasSubstr("stream://[::1]:"));
}

TEST(ControllerStream, WhatCannotBeListenedOnIsOneSentence) {
  const LiveServer living("stream://127.0.0.1:0");
  for (const std::string& stream : {living.endpoint(), std::string("stream://no.such.host.invalid:0"),
                                    std::string("unix:///no/such/folder/socket")}) {
    const auto server = Server::bind({.bind = "tcp://127.0.0.1:0", .stream = stream, .directory = {}}, steady_clock());
    ASSERT_FALSE(server) << stream;
    EXPECT_EQ(server.error().code, ErrorCode::kUnavailable);
    EXPECT_THAT(server.error().what, HasSubstr(stream));
  }
  const auto wrong =
      Server::bind({.bind = "tcp://127.0.0.1:0", .stream = "tcp://h:1", .directory = {}}, steady_clock());
  ASSERT_FALSE(wrong);
  EXPECT_EQ(wrong.error().code, ErrorCode::kInvalidArgument);
  EXPECT_THAT(wrong.error().what, HasSubstr("unix:///ABSOLUTE/PATH"));
}

class UnixPath : public ::testing::Test {
 protected:
  UnixPath() {
    char path[] = "/tmp/kvferry_testXXXXXX";
    folder_ = ::mkdtemp(path);
    path_ = folder_ + "/socket";
  }
  ~UnixPath() override { std::filesystem::remove_all(folder_); }
  Result<std::unique_ptr<Server>> bind() const {
    return Server::bind({.bind = "tcp://127.0.0.1:0", .stream = "unix://" + path_, .directory = {}}, steady_clock());
  }
  std::string folder_, path_;
};

TEST_F(UnixPath, OfADeadControllerIsTakenOver) {
  {
    // A socket's file at which no process listens, as a process leaves after kill -9.
    BoundSocket dead = listen_on({.path = path_}).value();
  }
  ASSERT_TRUE(std::filesystem::exists(path_));
  const auto server = bind();
  ASSERT_TRUE(server) << server.error().what;
}

TEST_F(UnixPath, OfALivingControllerIsLeftAlone) {
  const LiveServer living("unix://" + path_);
  const auto second = bind();
  ASSERT_FALSE(second);
  EXPECT_EQ(second.error().code, ErrorCode::kUnavailable);
  EXPECT_THAT(second.error().what, HasSubstr("in use"));
  EXPECT_THAT(living.status().nodes, IsEmpty()) << "it is reached still";
}

TEST_F(UnixPath, OfALivingListenerThatKnowsNoLocksIsLeftAlone) {
  const LiveServer living("unix://" + path_);
  std::filesystem::remove(path_ + ".lock");
  ASSERT_FALSE(bind());
  EXPECT_THAT(living.status().nodes, IsEmpty());
}

TEST_F(UnixPath, WithAFileOfSomebodyElsesIsLeftAlone) {
  std::ofstream(path_) << "precious";
  const auto server = bind();
  ASSERT_FALSE(server);
  EXPECT_THAT(server.error().what, HasSubstr("not a socket"));
  EXPECT_EQ(std::filesystem::file_size(path_), 8U);
}

TEST_F(UnixPath, IsGoneAfterAnOrderlyEnd) {
  { const LiveServer server("unix://" + path_); }
  EXPECT_FALSE(std::filesystem::exists(path_));
}

TEST(UnsentMessagesTest, OneMessageOfAnySizeWaitsAlone) {
  UnsentMessages out(100);
  EXPECT_TRUE(out.add(std::string(1000, 'a')));
  EXPECT_FALSE(out.add("b")) << "beside a long one nothing may wait";
  int ends[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
  const OwnedFd from(ends[0]), to(ends[1]);
  ASSERT_TRUE(out.write_to(from.get()));
  EXPECT_TRUE(out.empty());
  EXPECT_TRUE(out.add(std::string(50, 'a')));
  EXPECT_FALSE(out.add(std::string(51, 'b')));
}

/// With few allowed descriptors, silent unknown peers are disconnected when new peers connect.
TEST(ControllerStream, UnknownPeersMakeRoomForNewPeers) {
  rlimit limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  const rlimit lower{600, limit.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &lower), 0);
  LiveServer server("stream://127.0.0.1:0");  // there will be 300 connections
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
  LiveNode node(server.endpoint(), node_info("a"));
  ASSERT_TRUE(node.wait_for<Registered>());
  std::vector<std::unique_ptr<RawStream>> unknown_peers;
  for (int i = 0; i < 400; ++i) unknown_peers.push_back(std::make_unique<RawStream>(server.endpoint()));
  EXPECT_TRUE(unknown_peers.front()->has_ended());
  EXPECT_EQ(server.status().nodes.size(), 1U);
  EXPECT_EQ(node.who_has(ask_for(0, 1)), std::vector<std::string>{});
  EXPECT_EQ(node.count<Lost>(), 0U) << "who speaks for a node stays";
}

}  // namespace
}  // namespace kvferry::controller
