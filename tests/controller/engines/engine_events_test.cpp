#include "controller/engines/engine_events.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "controller/engines/block_chain.h"
#include "controller/protocol/msgpack_reader.h"
#include "tests/controller/engines/engine_test_kit.h"
#include "tests/transport/hex.h"

namespace kvferry::controller {
namespace {

using testing::ElementsAre;

struct Heard final : EngineEventSink {
  struct Event {
    std::string what;
    std::vector<ShortKey> hashes;
    std::vector<std::uint32_t> tokens;
    std::optional<ShortKey> parent;
    Tier tier = Tier::kGpu;
    std::optional<std::uint32_t> group;
    GroupKind kind = GroupKind::kUnknown;
    std::uint32_t block_size = 0;
    std::string cache_salt;
  };
  void stored(const BlocksStored& b) override {
    events.push_back({"stored",
                      {b.hashes.begin(), b.hashes.end()},
                      {b.tokens.begin(), b.tokens.end()},
                      b.parent,
                      b.tier,
                      b.group,
                      b.kind,
                      b.block_size,
                      std::string(b.cache_salt)});
  }
  void removed(const BlocksRemoved& b) override {
    events.push_back(
        {"removed", {b.hashes.begin(), b.hashes.end()}, {}, {}, b.tier, b.group, GroupKind::kUnknown, 0, ""});
  }
  void all_cleared() override { events.push_back({"cleared", {}, {}, {}, Tier::kGpu, {}, GroupKind::kUnknown, 0, ""}); }
  std::vector<Event> events;
};

TEST(EngineEvents, BothFormsAndBothKindsOfHashesSayTheSame) {
  const std::uint64_t big = 0xfedcba9876543210;
  for (const EventForm form : {EventForm::kMap, EventForm::kArray}) {
    for (const bool bytes : {false, true}) {
      Heard heard;
      EngineEventDecoder decoder;
      const std::string payload =
          BatchMaker(form, bytes)
              .stored({7, big}, 5, {0, 127, 128, 255, 256, 65535, 65536, 4'294'967'295}, 4, "CPU", 1, "full_attention")
              .removed({big}, "DISK", 1)
              .cleared()
              .done(3);
      const Result<EngineBatch> batch = decoder.decode(payload, heard);
      ASSERT_TRUE(batch) << batch.error().what;
      EXPECT_EQ(batch->dp_rank, 3U);
      EXPECT_EQ(rank_of_batch(payload), 3U);
      EXPECT_EQ(batch->num_events, 3U);
      ASSERT_EQ(heard.events.size(), 3U);
      EXPECT_THAT(heard.events[0].hashes, ElementsAre(7, big));
      EXPECT_EQ(heard.events[0].parent, 5U);
      EXPECT_THAT(heard.events[0].tokens, ElementsAre(0, 127, 128, 255, 256, 65535, 65536, 4'294'967'295));
      EXPECT_EQ(heard.events[0].tier, Tier::kHost);
      EXPECT_EQ(heard.events[0].group, 1U);
      EXPECT_EQ(heard.events[0].kind, GroupKind::kFullAttention);
      EXPECT_EQ(heard.events[0].block_size, 4U);
      EXPECT_THAT(heard.events[1].hashes, ElementsAre(big));
      EXPECT_EQ(heard.events[1].tier, Tier::kDisk);
      EXPECT_EQ(heard.events[1].group, 1U);
      EXPECT_EQ(heard.events[2].what, "cleared");
    }
  }
}

TEST(EngineEvents, WhatIsUnknownIsSkippedAndCounted) {
  Heard heard;
  EngineEventDecoder decoder;
  const Result<EngineBatch> batch =
      decoder.decode(BatchMaker().unknown().removed({1}).unknown().done(std::nullopt, true), heard);
  ASSERT_TRUE(batch) << batch.error().what;
  EXPECT_EQ(batch->num_unknown, 2U);
  EXPECT_EQ(batch->num_events, 1U);
  EXPECT_EQ(batch->dp_rank, std::nullopt);
  EXPECT_EQ(heard.events.size(), 1U);
}

TEST(EngineEvents, AnEventWithAWrongFieldIsPassedBy) {
  Heard heard;
  EngineEventDecoder decoder;
  msgpack::sbuffer buffer;
  msgpack::packer<msgpack::sbuffer> packer(buffer);
  packer.pack_array(2);
  packer.pack(1);
  packer.pack_array(2);
  packer.pack_array(2);
  packer.pack("BlockRemoved");
  packer.pack("no array");
  packer.pack_array(2);
  packer.pack("BlockRemoved");
  packer.pack(std::vector<int>{-1});  // encoded as a signed 64-bit number
  const Result<EngineBatch> batch = decoder.decode({buffer.data(), buffer.size()}, heard);
  ASSERT_TRUE(batch) << batch.error().what;
  EXPECT_EQ(batch->num_malformed, 1U);
  ASSERT_EQ(heard.events.size(), 1U);
  EXPECT_THAT(heard.events[0].hashes, ElementsAre(~std::uint64_t{0}));
}

TEST(EngineEvents, RanksOfAnyLengthAreRead) {
  for (const std::uint32_t rank : {0U, 127U, 128U, 255U, 256U, 1024U, 65'536U})
    EXPECT_EQ(rank_of_batch(BatchMaker(EventForm::kArray, false).cleared().done(rank)), rank);
}

/// Events from rank 3, encoded by msgspec from the classes of SGLang 0.5.23 (sglang/srt/disaggregation/kv_events.py):
/// two stored events, of which the second one has a cache salt, a removal and a clearing.
constexpr std::string_view kFromSglang =
    "93cb3ff80000000000009487a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657392fbcd0385b1706172656e745f62"
    "6c6f636b5f68617368c0a9746f6b656e5f6964739401020304aa626c6f636b5f73697a6502a76c6f72615f6964c0a66d656469756da34750"
    "5589a474797065ab426c6f636b53746f726564ac626c6f636b5f686173686573914db1706172656e745f626c6f636b5f68617368c0a9746f"
    "6b656e5f696473920102aa626c6f636b5f73697a6502a76c6f72615f6964c0a66d656469756daa4350555f50494e4e4544aa63616368655f"
    "73616c74a173aa73657373696f6e5f6964a17883a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391cd0385a6"
    "6d656469756da845585445524e414c81a474797065b0416c6c426c6f636b73436c656172656403";

TEST(EngineEvents, WhatSglangsOwnClassesSend) {
  Heard heard;
  EngineEventDecoder decoder;
  const Result<EngineBatch> batch = decoder.decode(from_hex(kFromSglang), heard);
  ASSERT_TRUE(batch) << batch.error().what;
  EXPECT_EQ(batch->dp_rank, 3U);
  EXPECT_EQ(batch->num_unknown + batch->num_malformed, 0U);
  ASSERT_EQ(heard.events.size(), 4U);
  EXPECT_THAT(heard.events[0].hashes, ElementsAre(static_cast<ShortKey>(-5), 901));
  EXPECT_THAT(heard.events[0].tokens, ElementsAre(1, 2, 3, 4));
  EXPECT_EQ(heard.events[0].parent, std::nullopt);
  EXPECT_EQ(heard.events[0].block_size, 2U);
  EXPECT_EQ(heard.events[0].cache_salt, "");
  EXPECT_EQ(heard.events[1].tier, Tier::kHost);
  EXPECT_EQ(heard.events[1].cache_salt, "s");
  EXPECT_EQ(heard.events[2].what, "removed");
  EXPECT_EQ(heard.events[2].tier, Tier::kRemote);
  EXPECT_EQ(heard.events[3].what, "cleared");
}

TEST(EngineEvents, MediaHaveTiers) {
  for (const auto& [medium, tier] : std::vector<std::pair<const char*, Tier>>{{"", Tier::kGpu},
                                                                              {"GPU", Tier::kGpu},
                                                                              {"gpu", Tier::kGpu},
                                                                              {"CPU", Tier::kHost},
                                                                              {"CPU_PINNED", Tier::kHost},
                                                                              {"STORAGE", Tier::kDisk},
                                                                              {"disk", Tier::kDisk},
                                                                              {"OBJ", Tier::kRemote}})
    EXPECT_EQ(tier_of_medium(medium), tier) << medium;
}

TEST(EngineEvents, ALyingCountAllocatesNothing) {
  Heard heard;
  EngineEventDecoder decoder;
  // the bytes of [0, [["BlockRemoved", and then an array that claims 2^32 - 1 hashes
  const std::string payload(
      "\x92\x00\x91\x92\xac"
      "BlockRemoved\xdd\xff\xff\xff\xff\x01",
      23);
  EXPECT_FALSE(decoder.decode(payload, heard));
  EXPECT_TRUE(heard.events.empty());
}

/// Checks, for random bytes, that the reader skips exactly what msgpack's own library takes for one value.
TEST(EngineEvents, RandomBytesAgreeWithTheMsgpackLibrary) {
  // otherwise the library would allocate an array of 2^32 elements and then refuse it
  const msgpack::unpack_limit few(64, 64, 64, 64, 64);
  std::mt19937_64 random(1);
  std::size_t num_valid = 0;
  for (int round = 0; round < 200'000; ++round) {
    std::string bytes(random() % 24 + 1, '\0');
    for (char& byte : bytes) byte = static_cast<char>(random() % 3 == 0 ? random() : 0x80 + random() % 0x60);
    std::size_t used = 0;
    bool is_valid = true;
    try {
      msgpack::unpack(bytes.data(), bytes.size(), used, nullptr, nullptr, few);
    } catch (const std::exception&) {
      is_valid = false;
    }
    MsgpackReader reader(bytes);
    ASSERT_EQ(reader.skip(), is_valid) << round;
    if (is_valid) {
      ASSERT_EQ(bytes.size() - reader.num_left(), used) << round;
    }
    num_valid += is_valid ? 1 : 0;
  }
  EXPECT_GT(num_valid, 10'000U);
}

TEST(EngineEvents, MutatedBatchesNeverCrash) {
  std::mt19937_64 random(2);
  EngineEventDecoder decoder;
  const std::string good = BatchMaker(EventForm::kMap, true)
                               .stored({1, 2, 3}, 9, std::vector<std::uint32_t>(12, 70'000), 4, "GPU", 0, "mamba")
                               .removed({4})
                               .unknown()
                               .cleared()
                               .done(1);
  std::size_t num_right = 0;
  for (int round = 0; round < 100'000; ++round) {
    std::string bad = good;
    for (std::size_t i = 1 + random() % 3; i > 0; --i) bad[random() % bad.size()] = static_cast<char>(random());
    if (random() % 4 == 0) bad.resize(random() % bad.size());
    // A copy in memory of exactly this size, so that a sanitizer notices a read after its end.
    const std::vector<char> exact(bad.begin(), bad.end());
    Heard heard;
    const std::string_view payload(exact.data(), exact.size());
    num_right += decoder.decode(payload, heard) ? 1 : 0;
    rank_of_batch(payload);
  }
  EXPECT_GT(num_right, 0U);
  EXPECT_LT(num_right, 100'000U);
}

TEST(EngineEvents, ExtrasOfABlockLeaveOutTheAdaptersName) {
  msgpack::sbuffer buffer;
  msgpack::packer<msgpack::sbuffer> packer(buffer);
  packer.pack_array(4);
  packer.pack(std::vector<std::string>{"lora", "salt"});
  packer.pack_nil();
  packer.pack(std::vector<std::string>{"lora"});
  packer.pack(std::vector<std::vector<int>>{{1, 2}});
  ExtraKeys extras({buffer.data(), buffer.size()}, "lora");
  EXPECT_EQ(extras.next(), salt_extras("salt"));
  EXPECT_EQ(extras.next(), 0U);
  EXPECT_EQ(extras.next(), 0U);
  EXPECT_NE(extras.next(), 0U);
  EXPECT_EQ(extras.next(), 0U);
}

}  // namespace
}  // namespace kvferry::controller
