// Tests peers that are not our client: they lose messages, send garbage, use another version, or never read.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <mutex>
#include <random>
#include <zmq.hpp>

#include "controller/protocol/wire.h"
#include "tests/controller/live.h"

namespace kvferry::controller {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

/// A plain socket with which a test can send any bytes.
class RawPeer {
 public:
  explicit RawPeer(const std::string& endpoint, int receive_queue_max = 1000) {
    socket_.set(zmq::sockopt::rcvhwm, receive_queue_max);
    socket_.set(zmq::sockopt::linger, 0);
    socket_.set(zmq::sockopt::rcvtimeo, static_cast<int>(kDeadlineMs));
    socket_.connect(endpoint);
  }
  void send(std::string_view bytes, bool more = false) {
    socket_.send(zmq::buffer(bytes), more ? zmq::send_flags::sndmore : zmq::send_flags::none);
  }
  wire::FromController receive() {
    zmq::message_t bytes;
    if (!socket_.recv(bytes)) throw std::runtime_error("no answer");
    return wire::parse<wire::FromController>(bytes.to_string_view()).value();
  }
  zmq::socket_t& socket() { return socket_; }

 private:
  zmq::context_t context_;
  zmq::socket_t socket_{context_, zmq::socket_type::dealer};
};

/// A relay between one client and the server. It drops the messages for which `drop` returns true; `drop` may also
/// change a message.
class Relay {
 public:
  explicit Relay(const std::string& server) {
    for (zmq::socket_t* socket : {&front_, &back_}) socket->set(zmq::sockopt::linger, 0);
    front_.bind("tcp://127.0.0.1:0");
    endpoint_ = front_.get(zmq::sockopt::last_endpoint);
    back_.connect(server);
    thread_ = std::thread([this] { run(); });
  }
  ~Relay() {
    stopping_ = true;
    thread_.join();
  }
  const std::string& endpoint() const { return endpoint_; }
  void set_drop(std::function<bool(wire::FromNode&)> drop) {
    const std::lock_guard lock(mutex_);
    drop_ = std::move(drop);
  }
  int num_dropped() const { return num_dropped_; }

 private:
  void run() {
    zmq::message_t client;
    while (!stopping_) {
      zmq::pollitem_t items[] = {{front_.handle(), 0, ZMQ_POLLIN, 0}, {back_.handle(), 0, ZMQ_POLLIN, 0}};
      zmq::poll(items, 2, std::chrono::milliseconds(20));
      zmq::message_t body;
      if ((items[0].revents & ZMQ_POLLIN) != 0 && front_.recv(client) && front_.recv(body)) {
        const std::lock_guard lock(mutex_);
        wire::FromNode message = wire::parse<wire::FromNode>(body.to_string_view()).value();
        if (drop_ && drop_(message))
          ++num_dropped_;
        else
          back_.send(zmq::buffer(std::visit([](const auto& known) { return encode(known); }, message)));
      }
      if ((items[1].revents & ZMQ_POLLIN) != 0 && back_.recv(body)) {
        front_.send(zmq::message_t(client.data(), client.size()), zmq::send_flags::sndmore);
        front_.send(body, zmq::send_flags::none);
      }
    }
  }

  zmq::context_t context_;
  zmq::socket_t front_{context_, zmq::socket_type::router};
  zmq::socket_t back_{context_, zmq::socket_type::dealer};
  std::string endpoint_;
  std::mutex mutex_;
  std::function<bool(wire::FromNode&)> drop_;
  std::atomic<int> num_dropped_{0};
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

class BadPeers : public ::testing::Test {
 protected:
  LiveServer server_{"tcp://127.0.0.1:0"};
  LiveNode asker_{server_.endpoint(), node_info("asker")};
  void SetUp() override { ASSERT_TRUE(asker_.wait_for<Registered>()); }
};

TEST_F(BadPeers, ALostPublishIsSentAgain) {
  Relay relay(server_.endpoint());
  LiveNode node(relay.endpoint(), node_info("b"));
  ASSERT_TRUE(node.wait_for<SnapshotWanted>());
  relay.set_drop([](const wire::FromNode& message) {
    const auto* publish = std::get_if<wire::Publish>(&message);
    // does not drop the beginning and the end of the snapshot
    return publish != nullptr && !publish->full.keys.empty();
  });
  node.hold(full_chunks(0, 2));
  ASSERT_TRUE(asker_.wait_until([&] { return relay.num_dropped() >= 1; }));
  relay.set_drop(nullptr);
  node.hold(full_chunks(2, 3));
  EXPECT_TRUE(asker_.wait_until([&] {
    node.turn(0);
    return asker_.who_has(ask_for(0, 3)) == std::vector<std::string>{"b:3"};
  }));
  EXPECT_EQ(node.count<SnapshotWanted>(), 1U);
  EXPECT_GE(server_.status().counters.resends_wanted, 1U);
}

TEST_F(BadPeers, WhatIsPublishedWhileTheControllerIsLostArrivesAfterwards) {
  Relay relay(server_.endpoint());
  LiveNode node(relay.endpoint(), node_info("b"));
  ASSERT_TRUE(node.wait_for<SnapshotWanted>());
  node.client().publish(full_chunks(0, 2));
  ASSERT_TRUE(asker_.wait_to_see(ask_for(0, 3), {"b:2"}));
  relay.set_drop([](const wire::FromNode&) { return true; });
  ASSERT_TRUE(node.wait_for<Lost>());
  node.client().publish(full_chunks(2, 3));
  node.client().evict(keys_of(0, 1));
  relay.set_drop(nullptr);
  ASSERT_TRUE(node.wait_for<Registered>(2));
  EXPECT_TRUE(asker_.wait_until([&] {
    node.turn(0);
    return asker_.who_has(ask_for(1, 3)) == std::vector<std::string>{"b:2"};
  }));
  EXPECT_TRUE(asker_.wait_until([&] {  // the eviction arrives after the chunk that was found before
    node.turn(0);
    return asker_.who_has(ask_for(0, 3)).empty();
  }));
  EXPECT_EQ(node.count<SnapshotWanted>(), 1U) << "the controller knew the rest";
}

TEST_F(BadPeers, AMessageThatSaysSomethingElseThanWasSentIsFoundByAHeartbeat) {
  Relay relay(server_.endpoint());
  LiveNode node(relay.endpoint(), node_info("b"));
  ASSERT_TRUE(node.wait_for<SnapshotWanted>());
  relay.set_drop([is_first = true](wire::FromNode& message) mutable {
    auto* publish = std::get_if<wire::Publish>(&message);
    if (publish != nullptr && !publish->full.keys.empty() && std::exchange(is_first, false))
      publish->full.keys = keys_of(5, 8);
    return false;
  });
  node.hold(full_chunks(0, 3));
  ASSERT_TRUE(node.wait_for<SnapshotWanted>(2));
  EXPECT_TRUE(asker_.wait_until([&] {
    node.turn(0);
    return asker_.who_has(ask_for(0, 3)) == std::vector<std::string>{"b:3"};
  }));
  EXPECT_THAT(asker_.who_has(ask_for(5, 8)), IsEmpty());
  EXPECT_EQ(server_.status().counters.digests_differed, 1U);
}

TEST_F(BadPeers, ALostLastEvictIsRepairedWithoutAnyFurtherNews) {
  Relay relay(server_.endpoint());
  LiveNode node(relay.endpoint(), node_info("b"));
  ASSERT_TRUE(node.wait_for<SnapshotWanted>());
  node.client().publish(full_chunks(0, 2));
  ASSERT_TRUE(asker_.wait_to_see(ask_for(0, 2), {"b:2"}));
  relay.set_drop([n = 0](const wire::FromNode& message) mutable {
    return std::holds_alternative<wire::Evict>(message) && n++ < 2;  // drops the message, and also its first repetition
  });
  node.client().evict(keys_of(0, 2));
  EXPECT_TRUE(asker_.wait_until([&] {
    node.turn(0);
    return asker_.who_has(ask_for(0, 2)).empty();
  })) << "a heartbeat tells the gap";
  EXPECT_EQ(relay.num_dropped(), 2);
  EXPECT_EQ(node.count<SnapshotWanted>(), 1U);
}

TEST_F(BadPeers, ALostLastMessageIsSeenWithoutWaitingForTheNextHeartbeat) {
  Relay relay(server_.endpoint());
  LiveNode node(relay.endpoint(), node_info("b"), /*heartbeat_ms=*/10 * kDeadlineMs);
  ASSERT_TRUE(node.wait_for<SnapshotWanted>());
  relay.set_drop([is_first = true](const wire::FromNode& message) mutable {
    const auto* publish = std::get_if<wire::Publish>(&message);
    return publish != nullptr && !publish->full.keys.empty() && std::exchange(is_first, false);
  });
  node.hold(full_chunks(0, 2));
  EXPECT_TRUE(asker_.wait_until([&] {
    node.turn(0);
    return asker_.who_has(ask_for(0, 2)) == std::vector<std::string>{"b:2"};
  }));
  EXPECT_EQ(relay.num_dropped(), 1);
}

TEST_F(BadPeers, ALostSnapshotIsAskedForAgain) {
  Relay relay(server_.endpoint());
  relay.set_drop([](const wire::FromNode& message) { return std::holds_alternative<wire::Publish>(message); });
  LiveNode node(relay.endpoint(), node_info("b"));
  node.hold(full_chunks(0, 2));  // before the registration, so the chunks are part of the snapshot
  ASSERT_TRUE(node.wait_until([&] { return relay.num_dropped() >= 9; })) << "begin, chunks and end, three times";
  EXPECT_EQ(node.count<SnapshotWanted>(), 1U) << "what is kept is enough";
  relay.set_drop(nullptr);
  EXPECT_TRUE(asker_.wait_until([&] {
    node.turn(0);
    return asker_.who_has(ask_for(0, 2)) == std::vector<std::string>{"b:2"};
  }));
  // After that, ten heartbeats must pass without another request.
  EXPECT_TRUE(node.wait_until([&] {
    const Counters before = server_.status().counters;
    return node.wait_until([&] { return server_.status().counters.heartbeats > before.heartbeats + 10; }) &&
           server_.status().counters.snapshots_wanted == before.snapshots_wanted &&
           server_.status().counters.resends_wanted == before.resends_wanted;
  }));
}

TEST_F(BadPeers, AnOlderNodeThatKnowsNoEndsOfSnapshotsIsServedAsBefore) {
  RawPeer peer(server_.endpoint());
  peer.send(encode(wire::Hello{.node = node_info("raw")}));
  ASSERT_TRUE(std::get<wire::Registered>(peer.receive()).snapshot_wanted);
  const auto publish = [&](std::uint64_t sequence, bool begins_snapshot, std::uint32_t from, std::uint32_t to) {
    peer.send(encode(wire::Publish{
        .incarnation = 1, .sequence = sequence, .begins_snapshot = begins_snapshot, .full = {keys_of(from, to)}}));
  };
  publish(0, true, 0, 0);
  publish(1, false, 0, 4);
  ASSERT_TRUE(asker_.wait_to_see(ask_for(0, 9), {"raw:4"}));
  EXPECT_TRUE(asker_.last<LookupReply>().holders[0].confirmed) << "its snapshot has no end to wait for";
  publish(3, false, 4, 5);  // message 2 is lost
  const auto wanted = std::get<wire::SnapshotWanted>(peer.receive());
  EXPECT_EQ(wanted.next_sequence, 4U) << "a snapshot begun below did not make it good";
  publish(4, true, 0, 0);
  publish(5, false, 0, 2);
  EXPECT_TRUE(asker_.wait_to_see(ask_for(0, 9), {"raw:2"}));
  peer.send(encode(wire::Heartbeat{.incarnation = 1, .next_sequence = 6}));
  EXPECT_TRUE(std::holds_alternative<wire::HeartbeatAck>(peer.receive())) << "no more wishes";
}

TEST_F(BadPeers, AFloodOfGarbageIsCountedAndChangesNothing) {
  RawPeer peer(server_.endpoint());
  std::mt19937 random(3);
  for (int i = 0; i < 5000; ++i) {
    std::string bytes(random() % 100, '\0');
    for (char& byte : bytes) byte = static_cast<char>(random());
    peer.send(bytes, i % 7 == 0 && i != 4999);
  }
  peer.send(encode(wire::Registered{}));     // only a controller sends this message
  peer.send(encode(wire::Publish{}));        // the sender is not registered
  peer.send(encode(wire::StatusRequest{}));  // after all this, the peer is still served
  EXPECT_TRUE(std::holds_alternative<wire::StatusReply>(peer.receive()));
  EXPECT_GT(server_.status().counters.messages_malformed, 3000U);
  EXPECT_TRUE(asker_.client().registered());
  LiveNode node(server_.endpoint(), node_info("b"));
  ASSERT_TRUE(node.wait_for<Registered>());
  node.hold(full_chunks(0, 2));
  EXPECT_TRUE(asker_.wait_to_see(ask_for(0, 2), {"b:2"}));
}

TEST_F(BadPeers, AMessageBeyondTheLimitEndsTheConnectionAlone) {
  RawPeer peer(server_.endpoint());
  peer.send(std::string(wire::kMessageBytesMax + 1, 'x'));
  RawPeer other(server_.endpoint());
  other.send(encode(wire::StatusRequest{}));
  EXPECT_TRUE(std::holds_alternative<wire::StatusReply>(other.receive()));
  EXPECT_TRUE(asker_.wait_to_see(ask_for(0, 1), {}));
  EXPECT_EQ(server_.status().counters.messages_malformed, 0U) << "it never got so far";
}

TEST_F(BadPeers, AnotherVersionIsRefusedInASentence) {
  RawPeer peer(server_.endpoint());
  wire::Hello hello;
  hello.header.version = 77;
  peer.send(encode(hello));
  const wire::FromController answer = peer.receive();
  ASSERT_TRUE(std::holds_alternative<wire::Refused>(answer));
  EXPECT_THAT(std::get<wire::Refused>(answer).reason, HasSubstr("version 77"));
}

TEST_F(BadPeers, ANodeNobodyKnowsIsToldToSayHello) {
  RawPeer peer(server_.endpoint());
  peer.send(encode(wire::Heartbeat{.incarnation = 42}));
  const wire::FromController answer = peer.receive();
  ASSERT_TRUE(std::holds_alternative<wire::Unregistered>(answer));
  EXPECT_EQ(std::get<wire::Unregistered>(answer).incarnation, 42U);
}

TEST_F(BadPeers, ATailWithoutItsColumnsIsDropped) {
  RawPeer peer(server_.endpoint());
  peer.send(encode(wire::Hello{.node = node_info("raw")}));
  ASSERT_TRUE(std::holds_alternative<wire::Registered>(peer.receive()));
  wire::Publish publish{.incarnation = 1, .tails = wire::to_columns(std::vector{tail_chunk(1, 2)})};
  publish.tails.num_tokens.clear();
  peer.send(encode(publish));
  peer.send(encode(wire::StatusRequest{}));
  const auto reply = std::get<wire::StatusReply>(peer.receive());
  EXPECT_EQ(reply.status.counters.messages_malformed, 1U);
  EXPECT_EQ(reply.status.counters.chunks_published, 0U);
}

TEST_F(BadPeers, ATierThatDoesNotExistIsDropped) {
  RawPeer peer(server_.endpoint());
  peer.send(encode(wire::Hello{.node = node_info("raw")}));
  ASSERT_TRUE(std::holds_alternative<wire::Registered>(peer.receive()));
  peer.send(encode(wire::Publish{.incarnation = 1, .full = {keys_of(0, 2)}, .tier = 3}));
  peer.send(encode(wire::Publish{.incarnation = 1, .sequence = 1, .full = {keys_of(2, 9)}, .tier = 4}));
  peer.send(encode(wire::Publish{.incarnation = 1, .sequence = 2, .full = {keys_of(9, 10)}}));
  peer.send(encode(wire::StatusRequest{}));
  const auto reply = std::get<wire::StatusReply>(peer.receive());
  EXPECT_EQ(reply.status.counters.messages_malformed, 1U);
  EXPECT_EQ(reply.status.counters.chunks_published, 3U);
  EXPECT_THAT(asker_.who_has(ask_for(9, 10)), ElementsAre("raw:1")) << "it holds up nothing";
}

TEST_F(BadPeers, APeerThatNeverReadsHoldsUpNobody) {
  NodeInfo wordy = node_info(std::string(250, 'x'));  // so that the answer is long
  wordy.endpoint = std::string(500, 'y');
  LiveNode node(server_.endpoint(), wordy);
  ASSERT_TRUE(node.wait_for<Registered>());
  RawPeer peer(server_.endpoint(), /*receive_queue_max=*/1);
  const std::string question = encode(wire::StatusRequest{});
  for (int i = 0; i < 20'000; ++i) peer.send(question);
  EXPECT_TRUE(asker_.wait_to_see(ask_for(0, 1), {}));
  EXPECT_TRUE(asker_.wait_until([&] { return server_.status().counters.replies_dropped > 0; }));
}

}  // namespace
}  // namespace kvferry::controller
