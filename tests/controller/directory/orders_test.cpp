// Tests admin commands over the protocol: which orders the controller's sessions send to which node.
#include "controller/directory/orders.h"

#include <gmock/gmock.h>

#include <map>

#include "controller/directory/sessions.h"
#include "controller/protocol/wire.h"
#include "tests/controller/fixtures.h"

namespace kvferry::controller {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;
using ::testing::UnorderedElementsAreArray;

class OrdersTest : public ::testing::Test, protected ReplySender {
 protected:
  bool send(ConnectionId to, std::string_view bytes) override {
    heard_[to].push_back(wire::parse<wire::FromController>(bytes).value());
    return true;
  }
  template <class T>
  void say(ConnectionId from, const T& message, const net::Identity& sender = {}) {
    sessions_.receive(from, encode(message), now_, *this, sender);
  }
  /// Returns all messages of one kind to `to` since the last call. Other messages to `to` are dropped.
  template <class T>
  std::vector<T> heard(ConnectionId to) {
    std::vector<T> found;
    for (wire::FromController& message : heard_[to])
      if (auto* wanted = std::get_if<T>(&message)) found.push_back(std::move(*wanted));
    heard_[to].clear();
    return found;
  }
  ConnectionId join(const std::string& name, std::uint64_t incarnation = 1, const net::Identity& member = {}) {
    const ConnectionId connection = sessions_.open();
    NodeInfo info = node_info(name, incarnation);
    info.endpoint = "tcp://" + name + ":1";
    say(connection, wire::Hello{.node = info}, member);
    say(connection, wire::Publish{.incarnation = incarnation, .sequence = 0, .begins_snapshot = true}, member);
    sequence_[connection] = 1;
    heard_[connection].clear();
    return connection;
  }
  void publish(ConnectionId node, std::vector<ChunkKey> keys, std::uint64_t incarnation = 1) {
    say(node, wire::Publish{.incarnation = incarnation, .sequence = sequence_[node]++, .full = {std::move(keys)}});
  }
  wire::AdminReply rule(const wire::AdminRequest& request, std::optional<ConnectionId> asker = std::nullopt) {
    const ConnectionId from = asker ? *asker : sessions_.open();
    say(from, request);
    for (wire::FromController& message : heard_[from])
      if (auto* reply = std::get_if<wire::AdminReply>(&message)) return *reply;
    ADD_FAILURE() << "no answer";
    return {};
  }
  void pass(TimeNs time) {
    sessions_.expire(now_ += time);
    for (const auto& [node, sequence] : sequence_) {  // sends heartbeats
      if (const auto* session = sessions_.session(node))
        say(node, wire::Heartbeat{.incarnation = session->incarnation.value, .next_sequence = sequence});
    }
  }
  NodeStatus status_of(const std::string& name) {
    for (const NodeStatus& node : sessions_.status(now_).nodes)
      if (node.engine_id.value == name) return node;
    return {};
  }

  Sessions sessions_{DirectoryOptions{}, 0};
  TimeNs now_ = kSecond;
  std::map<ConnectionId, std::vector<wire::FromController>> heard_;
  std::map<ConnectionId, std::uint64_t> sequence_;
};

TEST_F(OrdersTest, APinIsKeptByWhoeverHasItAndByWhoGetsItLater) {
  const ConnectionId a = join("a"), b = join("b");
  publish(a, keys_of(0, 4));
  const auto reply = rule({.verb = "pin", .owner = "ops", .keys = {keys_of(2, 6)}, .ttl_ms = 10'000});
  ASSERT_TRUE(reply.is_done) << reply.text;
  EXPECT_EQ(reply.text, "2 of 4 chunks were found; the 1 nodes that have them were ordered to pin them");
  const auto kept = heard<wire::Pin>(a);
  ASSERT_THAT(kept, SizeIs(1));
  EXPECT_EQ(kept[0].pin_id, reply.number);
  EXPECT_EQ(kept[0].ttl_ms, 10'000u);
  EXPECT_THAT(kept[0].keys.keys, UnorderedElementsAreArray(keys_of(2, 4)));
  EXPECT_THAT(heard<wire::Pin>(b), IsEmpty());
  now_ += 4 * kSecond;
  publish(b, keys_of(5, 9));
  const auto later = heard<wire::Pin>(b);
  ASSERT_THAT(later, SizeIs(1));
  EXPECT_EQ(later[0].ttl_ms, 6'000u);
  EXPECT_THAT(later[0].keys.keys, ElementsAre(key_of(5)));

  EXPECT_TRUE(rule({.verb = "unpin", .number = reply.number}).is_done);
  EXPECT_THAT(heard<wire::Unpin>(a), SizeIs(1));
  EXPECT_THAT(heard<wire::Unpin>(b), SizeIs(1));
  EXPECT_THAT(rule({.verb = "unpin", .number = reply.number}).text, HasSubstr("there is no pin"));
}

TEST_F(OrdersTest, AReadersLeaseEndsWithTheReader) {
  const ConnectionId holder = join("holder"), reader = join("reader");
  publish(holder, keys_of(0, 4));
  const auto reply = rule({.verb = "pin", .keys = {keys_of(0, 4)}, .ttl_ms = 60'000}, reader);
  ASSERT_TRUE(reply.is_done) << reply.text;
  EXPECT_EQ(sessions_.status(now_).num_pinned_keys, 4u);
  heard_[holder].clear();
  say(reader, wire::Leave{.incarnation = 1});
  const auto over = heard<wire::Unpin>(holder);
  ASSERT_THAT(over, SizeIs(1));
  EXPECT_EQ(over[0].pin_id, reply.number);
  EXPECT_EQ(sessions_.status(now_).num_pins, 0u);
}

TEST_F(OrdersTest, NobodyEndsAReadersLeasesByTakingItsName) {
  const ConnectionId reader = join("reader");
  rule({.verb = "pin", .keys = {keys_of(0, 4)}, .ttl_ms = 60'000}, reader);
  EXPECT_THAT(rule({.verb = "pin", .owner = "node 'reader'", .keys = {keys_of(0, 1)}, .ttl_ms = 60'000}).text,
              HasSubstr("cannot begin with 'node '"));
  EXPECT_THAT(rule({.verb = "pin", .keys = {keys_of(0, 1)}, .ttl_ms = 60'000}).text, HasSubstr("needs an owner"));
}

TEST_F(OrdersTest, APinEndsAtItsDeadline) {
  const ConnectionId a = join("a");
  rule({.verb = "pin", .owner = "ops", .keys = {keys_of(0, 4)}, .ttl_ms = 1000});
  pass(kSecond / 2);
  EXPECT_EQ(sessions_.status(now_).num_pins, 1u);
  pass(kSecond);
  EXPECT_EQ(sessions_.status(now_).num_pins, 0u);
  publish(a, keys_of(0, 4));
  EXPECT_THAT(heard<wire::Pin>(a), IsEmpty());
}

TEST_F(OrdersTest, ADrainedNodeTellsAllAndWhatOnlyItHasGoesToOthers) {
  const ConnectionId leaving = join("leaving"), other = join("other");
  publish(leaving, keys_of(0, 10));
  publish(other, keys_of(0, 4));
  ASSERT_TRUE(rule({.verb = "drain", .engine_id = "leaving"}).is_done);
  ASSERT_THAT(heard<wire::SnapshotWanted>(leaving), SizeIs(1));
  EXPECT_TRUE(status_of("leaving").is_leaving);
  EXPECT_FALSE(status_of("leaving").is_drained);
  say(leaving, wire::Publish{.incarnation = 1,
                             .sequence = sequence_[leaving]++,
                             .begins_snapshot = true,
                             .full = {keys_of(0, 10)},
                             .has_end = true});
  say(leaving, wire::Publish{.incarnation = 1, .sequence = sequence_[leaving]++, .ends_snapshot = true});
  pass(100 * kMillisecond);
  const auto brought = heard<wire::Replicate>(other);
  ASSERT_THAT(brought, SizeIs(1));
  EXPECT_EQ(brought[0].engine_id, "leaving");
  EXPECT_EQ(brought[0].endpoint, "tcp://leaving:1");
  EXPECT_THAT(brought[0].full.keys, UnorderedElementsAreArray(keys_of(4, 10)));
  EXPECT_EQ(status_of("leaving").num_to_replicate, 6u);
  publish(other, keys_of(4, 10));
  pass(100 * kMillisecond);
  EXPECT_TRUE(status_of("leaving").is_drained);
  EXPECT_EQ(status_of("leaving").num_replicated, 6u);
  EXPECT_TRUE(rule({.verb = "undrain", .engine_id = "leaving"}).is_done);
  EXPECT_FALSE(status_of("leaving").is_leaving);
  EXPECT_FALSE(rule({.verb = "undrain", .engine_id = "leaving"}).is_done);
}

TEST_F(OrdersTest, ADrainThatBeginsDuringASnapshotAsksForAnother) {
  const ConnectionId leaving = join("leaving");
  const auto snapshot = [&](bool begins) {
    say(leaving, wire::Publish{.incarnation = 1,
                               .sequence = sequence_[leaving]++,
                               .begins_snapshot = begins,
                               .full = {begins ? keys_of(0, 10) : std::vector<ChunkKey>{}},
                               .has_end = begins,
                               .ends_snapshot = !begins});
  };
  snapshot(true);
  ASSERT_TRUE(rule({.verb = "drain", .engine_id = "leaving"}).is_done);
  heard<wire::SnapshotWanted>(leaving);  // repeats what the snapshot in progress answers
  snapshot(false);
  pass(100 * kMillisecond);
  const auto asked = heard<wire::SnapshotWanted>(leaving);
  ASSERT_THAT(asked, Not(IsEmpty()));
  EXPECT_FALSE(asked.back().resend_will_do);
  snapshot(true);
  snapshot(false);
  pass(100 * kMillisecond);
  EXPECT_THAT(heard<wire::SnapshotWanted>(leaving), IsEmpty());
  EXPECT_EQ(status_of("leaving").num_to_replicate, 10u);
}

TEST_F(OrdersTest, ALeavingNodeComesLastInLookups) {
  const ConnectionId a = join("a"), b = join("b"), asker = join("asker");
  publish(a, keys_of(0, 10));
  publish(b, keys_of(0, 4));
  const auto first = [&] {
    say(asker, wire::Lookup{.incarnation = 1, .keys = {keys_of(0, 10)}});
    return heard<wire::LookupReply>(asker).at(0).holders.at(0).engine_id.value;
  };
  EXPECT_EQ(first(), "a");
  rule({.verb = "drain", .engine_id = "a"});
  EXPECT_EQ(first(), "b");
  rule({.verb = "undrain", .engine_id = "a"});
  EXPECT_EQ(first(), "a");
}

TEST_F(OrdersTest, AMovedChunkIsDroppedWhereItCameFromOnceItHasArrived) {
  const ConnectionId a = join("a"), b = join("b");
  say(a, wire::Publish{.incarnation = 1,
                       .sequence = sequence_[a]++,
                       .full = {keys_of(0, 3)},
                       .tails = {{{key_of(9)}}, {{key_of(99)}}, {40}}});
  const auto reply = rule({.verb = "move",
                           .engine_id = "a",
                           .other_engine_id = "b",
                           .keys = {{key_of(0), key_of(1), key_of(9), key_of(77)}}});
  ASSERT_TRUE(reply.is_done) << reply.text;
  EXPECT_EQ(reply.number, 3u);
  const auto brought = heard<wire::Replicate>(b);
  ASSERT_THAT(brought, SizeIs(1));
  EXPECT_THAT(brought[0].full.keys, SizeIs(2));
  EXPECT_THAT(brought[0].tails.num_tokens, ElementsAre(40));
  pass(100 * kMillisecond);
  EXPECT_THAT(heard<wire::EvictOrder>(a), IsEmpty());
  publish(b, keys_of(0, 1));
  pass(100 * kMillisecond);
  const auto dropped = heard<wire::EvictOrder>(a);
  ASSERT_THAT(dropped, SizeIs(1));
  EXPECT_FALSE(dropped[0].all);
  EXPECT_THAT(dropped[0].keys.keys, ElementsAre(key_of(0)));
}

TEST_F(OrdersTest, ClearingAsksANamespacesNodesOrOne) {
  const ConnectionId a = join("a"), b = join("b");
  EXPECT_EQ(rule({.verb = "clear"}).number, 2u);
  EXPECT_TRUE(heard<wire::EvictOrder>(a).at(0).all);
  EXPECT_TRUE(heard<wire::EvictOrder>(b).at(0).all);
  EXPECT_EQ(rule({.verb = "clear", .engine_id = "b"}).number, 1u);
  EXPECT_THAT(heard<wire::EvictOrder>(a), IsEmpty());
  EXPECT_THAT(heard<wire::EvictOrder>(b), SizeIs(1));
  EXPECT_THAT(rule({.verb = "clear", .name_space = "empty"}).text, HasSubstr("namespace 'empty' has no nodes"));
}

TEST_F(OrdersTest, APurgeTellsAllNodesAndThoseThatComeLater) {
  const ConnectionId a = join("a"), b = join("b");
  const wire::AdminReply reply = rule({.verb = "purge", .engine_id = "b"});
  ASSERT_TRUE(reply.is_done) << reply.text;
  EXPECT_EQ(reply.text, "2 nodes were ordered to drop the chunks that came from node 'b' at tcp://b:1");
  for (const ConnectionId node : {a, b}) {
    const auto told = heard<wire::PurgeOrder>(node);
    ASSERT_THAT(told, SizeIs(1));
    EXPECT_EQ(told[0].purge_id, reply.number);
    EXPECT_EQ(told[0].giver, "tcp://b:1");
  }
  const ConnectionId later = sessions_.open();
  NodeInfo info = node_info("c", 1);
  info.endpoint = "tcp://c:1";
  say(later, wire::Hello{.node = info});
  EXPECT_EQ(heard<wire::PurgeOrder>(later).at(0).purge_id, reply.number);
  EXPECT_GT(rule({.verb = "purge", .engine_id = "b"}).number, reply.number);
}

TEST_F(OrdersTest, APurgeEndsWhenANewerProcessIsWhereThePurgedOneWas) {
  const ConnectionId a = join("a");
  join("b");
  ASSERT_TRUE(rule({.verb = "purge", .engine_id = "b"}).is_done);
  EXPECT_THAT(heard<wire::PurgeOrder>(a), SizeIs(1));
  const ConnectionId again = sessions_.open();
  NodeInfo info = node_info("b", 1);
  info.endpoint = "tcp://b:1";
  say(again, wire::Hello{.node = info});
  EXPECT_THAT(heard<wire::PurgeOrder>(a), IsEmpty()) << "the same process has registered again";
  EXPECT_THAT(heard<wire::PurgeOrder>(again), SizeIs(1));
  info = node_info("b", 2);
  info.endpoint = "tcp://b:1";
  say(sessions_.open(), wire::Hello{.node = info});
  const auto told = heard<wire::PurgeOrder>(a);
  ASSERT_THAT(told, SizeIs(1));
  EXPECT_EQ(told[0].purge_id, 0u);
  EXPECT_EQ(told[0].giver, "tcp://b:1");
}

TEST_F(OrdersTest, ANodeThatComesAfterThePurgedOneHasStartedAnewIsToldOfBoth) {
  join("b");
  ASSERT_TRUE(rule({.verb = "purge", .engine_id = "b"}).is_done);
  join("b", 2);
  const ConnectionId lost = sessions_.open();
  NodeInfo info = node_info("c", 1);
  info.endpoint = "tcp://c:1";
  say(lost, wire::Hello{.node = info});
  const auto told = heard<wire::PurgeOrder>(lost);
  ASSERT_THAT(told, SizeIs(2));
  EXPECT_NE(told[0].purge_id, 0u) << "it may have chunks of the purged process";
  EXPECT_EQ(told[1].purge_id, 0u) << "and takes those of the new one";
  for (const wire::PurgeOrder& one : told) EXPECT_EQ(one.giver, "tcp://b:1");
}

TEST_F(OrdersTest, ANodeThatIsGoneIsPurgedByItsEndpoint) {
  const ConnectionId a = join("a");
  EXPECT_THAT(rule({.verb = "purge", .engine_id = "b"}).text,
              HasSubstr("has no node 'b', and lost no such node in the last ten minutes"));
  for (const char* name : {"", "tcp://", "tcp://:1", "tcp://b", "tcp://b:"})
    EXPECT_FALSE(rule({.verb = "purge", .engine_id = name}).is_done) << name;
  ASSERT_TRUE(rule({.verb = "purge", .engine_id = "tcp://b:1"}).is_done);
  EXPECT_EQ(heard<wire::PurgeOrder>(a).at(0).giver, "tcp://b:1");
  EXPECT_THAT(rule({.verb = "purge", .name_space = "empty", .engine_id = "a"}).text,
              HasSubstr("namespace 'empty' has no nodes"));
}

TEST_F(OrdersTest, AMemberIsPurgedByItsNameUntilANewerProcessOfItComes) {
  const net::Identity bad{"bad", net::Role::kWorker};
  const ConnectionId a = join("a"), first = join("bad", 3, bad);
  join("bad.2", 5, bad);
  for (const char* name : {"member:", "member:b_d", "member:a/b"})
    EXPECT_THAT(rule({.verb = "purge", .engine_id = name}).text, HasSubstr("can't be a member's name")) << name;
  const wire::AdminReply reply = rule({.verb = "purge", .engine_id = "member:bad"});
  EXPECT_EQ(reply.text, "3 nodes were ordered to drop the chunks that came from member:bad");
  for (const ConnectionId node : {a, first}) {
    const auto told = heard<wire::PurgeOrder>(node);
    ASSERT_THAT(told, SizeIs(1));
    EXPECT_EQ(told[0].purge_id, reply.number);
    EXPECT_EQ(told[0].giver, "member:bad");
  }
  join("bad", 4, bad);
  join("c", 9);
  join("badly", 9, {"badly", net::Role::kWorker});
  EXPECT_THAT(heard<wire::PurgeOrder>(a), IsEmpty()) << "a process that is older than another, or of others";
  join("bad.2", 6, bad);
  const auto told = heard<wire::PurgeOrder>(a);
  ASSERT_THAT(told, SizeIs(1));
  EXPECT_EQ(told[0].purge_id, 0u);
  EXPECT_EQ(told[0].giver, "member:bad");
}

TEST_F(OrdersTest, AMemberWhoseNodesAreGoneIsPurgedByItsName) {
  const ConnectionId a = join("a");
  ASSERT_TRUE(rule({.verb = "purge", .engine_id = "member:bad"}).is_done);
  EXPECT_EQ(heard<wire::PurgeOrder>(a).at(0).giver, "member:bad");
}

TEST_F(OrdersTest, CopiesAreToBeMadeOfANodeWithTheNameOfItsMember) {
  const ConnectionId from = join("m", 1, {"m", net::Role::kWorker}), to = join("b");
  publish(from, keys_of(0, 2));
  ASSERT_TRUE(rule({.verb = "move", .engine_id = "m", .other_engine_id = "b", .keys = {keys_of(0, 2)}}).is_done);
  EXPECT_EQ(heard<wire::Replicate>(to).at(0).member, "m");
  say(to, wire::Lookup{.incarnation = 1, .token = 1, .keys = {keys_of(0, 2)}});
  EXPECT_EQ(heard<wire::LookupReply>(to).at(0).holders.at(0).member, "m");
}

TEST_F(OrdersTest, AQuotaBoundsANamespace) {
  const ConnectionId a = join("a"), b = join("b");
  ASSERT_TRUE(rule({.verb = "quota", .number = 6}).is_done);
  publish(a, keys_of(0, 4));
  publish(b, keys_of(10, 14));
  EXPECT_EQ(status_of("a").num_chunks, 4u);
  EXPECT_EQ(status_of("b").num_chunks, 2u);
  EXPECT_EQ(sessions_.status(now_).counters.chunks_dropped, 2u);
  say(a, wire::Evict{.incarnation = 1, .sequence = sequence_[a]++, .keys = {keys_of(0, 4)}});
  publish(b, keys_of(20, 28));
  EXPECT_EQ(status_of("b").num_chunks, 6u);
  ASSERT_TRUE(rule({.verb = "quota", .number = ~std::uint64_t{0}}).is_done);
  publish(b, keys_of(30, 38));
  EXPECT_EQ(status_of("b").num_chunks, 14u);
  say(b, wire::Leave{.incarnation = 1});
  rule({.verb = "quota", .number = 3});
  publish(a, keys_of(0, 4));
  EXPECT_EQ(status_of("a").num_chunks, 3u);
}

TEST_F(OrdersTest, NonsenseIsRefusedWithASentence) {
  join("a");
  const auto text = [&](const wire::AdminRequest& request) {
    const auto reply = rule(request);
    EXPECT_FALSE(reply.is_done);
    return reply.text;
  };
  EXPECT_THAT(text({.verb = "explode"}), HasSubstr("allowed: pin, unpin, drain, undrain, move, clear, purge, quota"));
  EXPECT_THAT(text({.verb = "drain", .engine_id = "b"}), HasSubstr("has no node 'b'; it has a"));
  EXPECT_THAT(text({.verb = "drain", .name_space = "x", .engine_id = "b"}), HasSubstr("it has none"));
  EXPECT_THAT(text({.verb = "move", .engine_id = "a", .other_engine_id = "a"}),
              HasSubstr("needs a source node and another node"));
  EXPECT_THAT(text({.verb = "pin", .owner = "o", .keys = {keys_of(0, 1)}}), HasSubstr("a pin can't last 0 ms"));
  EXPECT_THAT(text({.verb = "pin", .owner = "o", .keys = {keys_of(0, 1)}, .ttl_ms = ~std::uint64_t{0}}),
              HasSubstr("a pin can't last 18446744073709551615 ms; 1 to 86400000 are allowed"));
}

TEST_F(OrdersTest, OrdersForANodeWithoutAConnectionAreDropped) {
  const ConnectionId a = join("a");
  publish(a, keys_of(0, 4));
  sessions_.disconnected(a);
  EXPECT_TRUE(rule({.verb = "clear"}).is_done);
  EXPECT_EQ(sessions_.counters().replies_dropped, 1u);
  EXPECT_EQ(sessions_.counters().orders_sent, 0u);
}

}  // namespace
}  // namespace kvferry::controller
