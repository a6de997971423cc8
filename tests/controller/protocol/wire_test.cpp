#include "controller/protocol/wire.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "tests/controller/fixtures.h"

namespace kvferry::controller::wire {
namespace {

using ::testing::HasSubstr;

struct NewerLeave {
  Header header{kProtocolVersion, Leave{}.header.type};
  std::uint64_t incarnation = 3;
  std::vector<std::string> reasons{"tired"};
  KVFERRY_FIELDS(header, incarnation, reasons);
};

struct OlderHello {
  Header header{kProtocolVersion, Hello{}.header.type};
  std::string name_space{"default"}, engine_id{"a"};
  std::uint64_t incarnation = 3;
  std::string role{}, endpoint{"tcp://h:1"}, fingerprint{"model=a"};
  std::uint64_t next_sequence = 0;
  KVFERRY_FIELDS(header, name_space, engine_id, incarnation, role, endpoint, fingerprint, next_sequence);
};
struct OlderHeartbeat {
  Header header{kProtocolVersion, Heartbeat{}.header.type};
  std::uint64_t incarnation = 3, next_sequence = 5;
  KVFERRY_FIELDS(header, incarnation, next_sequence);
};
struct OlderBegin {
  Header header{kProtocolVersion, Publish{}.header.type};
  std::uint64_t incarnation = 3, sequence = 4;
  bool begins_snapshot = true;
  KeyBlob full{};
  TailColumns tails{};
  KVFERRY_FIELDS(header, incarnation, sequence, begins_snapshot, full, tails);
};
struct OlderSnapshotWanted {
  Header header{kProtocolVersion, SnapshotWanted{}.header.type};
  std::uint64_t incarnation = 3, next_sequence = 4;
  KVFERRY_FIELDS(header, incarnation, next_sequence);
};

template <class T>
using MessageOf = std::conditional_t<std::is_constructible_v<FromNode, T>, FromNode, FromController>;

template <class T>
T round_trip(const T& message) {
  Result<MessageOf<T>> parsed = parse<MessageOf<T>>(encode(message));
  EXPECT_TRUE(parsed) << parsed.error().what;
  EXPECT_TRUE(std::holds_alternative<T>(*parsed));
  return std::get<T>(*parsed);
}

template <class Message, std::size_t... I>
void round_trip_all(std::index_sequence<I...>) {
  (round_trip(std::variant_alternative_t<I, Message>{}), ...);
}

TEST(ControllerWire, EveryKindOfMessageComesBackAsItself) {
  round_trip_all<FromNode>(std::make_index_sequence<std::variant_size_v<FromNode>>{});
  round_trip_all<FromController>(std::make_index_sequence<std::variant_size_v<FromController>>{});
}

TEST(ControllerWire, FieldsSurviveARoundTrip) {
  Publish publish{.incarnation = 7, .sequence = 9, .begins_snapshot = true};
  std::vector<ChunkEntry> chunks = full_chunks(0, 3);
  chunks.push_back(tail_chunk(10, 50, 40));
  chunks.push_back(tail_chunk(11, 51, 3));  // too short to have a group
  split_entries(chunks, publish.full, publish.tails);
  publish.has_end = publish.ends_snapshot = true;
  const Publish got = round_trip(publish);
  EXPECT_TRUE(got.has_end);
  EXPECT_TRUE(got.ends_snapshot);
  EXPECT_EQ(got.incarnation, 7U);
  EXPECT_EQ(got.sequence, 9U);
  EXPECT_TRUE(got.begins_snapshot);
  EXPECT_EQ(got.full.keys, keys_of(0, 3));
  const std::vector<ChunkEntry> tails = join_entries({}, got.tails).value();
  ASSERT_EQ(tails.size(), 2U);
  EXPECT_EQ(tails[0].key, key_of(10));
  EXPECT_EQ(tails[0].num_tokens, 40U);
  EXPECT_EQ(tails[0].tail_group, key_of(50));
  EXPECT_TRUE(tails[0].is_tail);
  EXPECT_EQ(tails[1].tail_group, ChunkKey{});

  const Heartbeat beat = round_trip(Heartbeat{.next_sequence = 4, .digests = {{1, 2}, {3, ~std::uint64_t{0}}}});
  EXPECT_EQ(beat.digests, (std::vector<TierDigest>{{1, 2}, {3, ~std::uint64_t{0}}}));
  const SnapshotWanted wanted = round_trip(SnapshotWanted{.resend_will_do = true, .resend_from = 3});
  EXPECT_TRUE(wanted.resend_will_do);
  EXPECT_EQ(wanted.resend_from, 3U);

  LookupReply reply{.token = 5,
                    .holders = {{EngineId{"engine"}, Incarnation{3}, "tcp://h:1", 4, tails, Tier::kDisk, false}},
                    .index_version = 11};
  const LookupReply got_reply = round_trip(reply);
  ASSERT_EQ(got_reply.holders.size(), 1U);
  EXPECT_EQ(got_reply.holders[0].engine_id.value, "engine");
  EXPECT_EQ(got_reply.holders[0].num_full_chunks, 4U);
  EXPECT_EQ(got_reply.holders[0].tails.size(), 2U);
  EXPECT_EQ(got_reply.holders[0].tier, Tier::kDisk);
  EXPECT_EQ(tier_of(4), std::nullopt);
  EXPECT_FALSE(got_reply.holders[0].confirmed);
  EXPECT_EQ(got_reply.index_version, 11U);
}

TEST(ControllerWire, KeysTravelAsOneBinary) {
  const std::string bytes = encode(Lookup{.token = 1, .keys = {keys_of(0, 100)}});
  EXPECT_LT(bytes.size(), 100 * 16 + 32);
}

TEST(ControllerWire, NewerOptionalFieldsAreIgnored) {
  const Result<FromNode> parsed = parse<FromNode>(encode(NewerLeave{}));
  ASSERT_TRUE(parsed) << parsed.error().what;
  EXPECT_EQ(std::get<Leave>(*parsed).incarnation, 3U);
}

TEST(ControllerWire, WhatOlderPeersDoNotSayMeansWhatItMeantToThem) {
  const auto beat = std::get<Heartbeat>(parse<FromNode>(encode(OlderHeartbeat{})).value());
  EXPECT_EQ(beat.next_sequence, 5U);
  EXPECT_TRUE(beat.digests.empty()) << "not to be judged";
  const auto begin = std::get<Publish>(parse<FromNode>(encode(OlderBegin{})).value());
  EXPECT_TRUE(begin.begins_snapshot);
  EXPECT_FALSE(begin.has_end) << "void at once";
  const auto wanted = std::get<SnapshotWanted>(parse<FromController>(encode(OlderSnapshotWanted{})).value());
  EXPECT_FALSE(wanted.resend_will_do);
  EXPECT_EQ(wanted.resend_from, ~std::uint64_t{0});
}

TEST(ControllerWire, WhatANewNodeSaysMoreOldControllersLeaveOut) {
  const auto older = decode<OlderHello>(
      encode(Hello{.node = {.engine_id = EngineId{"a"}, .serves = "http://a:1"}, .next_sequence = 9}), "");
  ASSERT_TRUE(older);
  EXPECT_EQ(older->engine_id, "a");
  EXPECT_EQ(older->next_sequence, 9U);
  const auto beat = decode<OlderHeartbeat>(encode(Heartbeat{.next_sequence = 4, .load = 7}), "");
  ASSERT_TRUE(beat);
  EXPECT_EQ(beat->next_sequence, 4U);
  const auto hello = std::get<Hello>(parse<FromNode>(encode(OlderHello{})).value());
  EXPECT_EQ(hello.node.serves, "");
  EXPECT_EQ(hello.newest_protocol, 0U);
}

TEST(ControllerWire, AnotherVersionIsRefusedInASentenceWithBothNumbers) {
  const Result<FromNode> parsed = parse<FromNode>(encode(Heartbeat{.header = {kProtocolVersion + 8, 4}}));
  ASSERT_FALSE(parsed);
  EXPECT_EQ(parsed.error().code, ErrorCode::kRefused);
  EXPECT_THAT(parsed.error().what, HasSubstr(std::to_string(kProtocolVersion + 8)));
  EXPECT_THAT(parsed.error().what, HasSubstr(fmt::format("speaks {},", to_text(kProtocol))));
}

TEST(ControllerWire, ARefusalOfAnotherVersionCanBeRead) {
  const Result<FromController> parsed =
      parse<FromController>(encode(Refused{.header = {99, Refused{}.header.type}, .reason = "too old"}));
  ASSERT_TRUE(parsed);
  EXPECT_EQ(std::get<Refused>(*parsed).reason, "too old");
}

TEST(ControllerWire, ColumnsOfUnequalLengthAreCorrupt) {
  TailColumns columns = to_columns(std::vector{tail_chunk(1, 2), tail_chunk(3, 4)});
  columns.num_tokens.pop_back();
  EXPECT_EQ(join_entries({}, columns).error().code, ErrorCode::kCorrupt);
}

TEST(ControllerWire, GarbageIsAnErrorAndNeverAllocatesWhatItClaims) {
  using namespace std::string_literals;
  for (const std::string& bytes :
       {""s, "\xc1"s, "\x90"s, "\x91\x01"s, "\x91\x91\x01"s, "\x92\x92\x01\x63\x00"s, "\xdd\xff\xff\xff\xff"s,
        "\xdf\x7f\xff\xff\xff"s, "\xc6\xff\xff\xff\xff"s, std::string(100'000, '\x91')}) {
    const Result<FromNode> parsed = parse<FromNode>(bytes);
    ASSERT_FALSE(parsed);
    EXPECT_EQ(parsed.error().code, ErrorCode::kCorrupt);
  }
  EXPECT_FALSE(parse<FromNode>(encode(Lookup{.keys = {keys_of(0, 2)}}).substr(0, 30)));
}

TEST(ControllerWire, FlippedAndCutBytesNeverDoMoreThanFail) {
  std::mt19937 random(7);
  Publish publish{.incarnation = 7, .sequence = 9, .full = {keys_of(0, 5)}};
  publish.tails = to_columns(std::vector{tail_chunk(1, 2), tail_chunk(3, 4)});
  const std::string good = encode(publish);
  int num_refused = 0;
  for (int i = 0; i < 20'000; ++i) {
    std::string bytes = good;
    for (int flips = 1 + static_cast<int>(random() % 3); flips > 0; --flips)
      bytes[random() % bytes.size()] = static_cast<char>(random());
    bytes.resize(bytes.size() - random() % 4);
    const Result<FromNode> parsed = parse<FromNode>(bytes);
    if (!parsed) ++num_refused;
  }
  EXPECT_GT(num_refused, 1000);
  EXPECT_TRUE(parse<FromNode>(good));
}

}  // namespace
}  // namespace kvferry::controller::wire
