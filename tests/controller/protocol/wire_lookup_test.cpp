// Compares the fast reader of lookups with the reader of all messages: for any bytes, both give the same verdict and
// the same fields.
#include <gtest/gtest.h>

#include <cstdlib>
#include <random>

#include "controller/protocol/wire.h"
#include "tests/controller/fixtures.h"

namespace kvferry::controller::wire {
namespace {

class Dice {
 public:
  explicit Dice(std::uint64_t seed) : random_(seed) {}
  std::uint64_t draw(std::uint64_t end) { return random_() % end; }
  std::uint64_t number() { return random_() >> draw(64); }  // a number with a random number of bits
  std::vector<ChunkKey> keys() {
    // numbers around each length at which msgpack uses another format
    static const std::size_t kNumbers[] = {0, 0, 1, 2, 15, 16, 17, 4096};
    std::vector<ChunkKey> keys(kNumbers[draw(100) == 0 ? 7 : draw(7)]);
    for (ChunkKey& key : keys) {
      for (std::uint8_t& byte : key.bytes) byte = static_cast<std::uint8_t>(random_());
    }
    return keys;
  }
  Lookup lookup() {
    return {
        .incarnation = number(), .token = number(), .keys = {keys()}, .tail_groups = {keys()}, .exact_tails = {keys()}};
  }

 private:
  std::mt19937_64 random_;
};

std::vector<ChunkKey> copy(std::span<const ChunkKey> keys) { return {keys.begin(), keys.end()}; }

/// Returns true if the fast reader accepted the bytes.
bool agrees(std::string_view bytes, std::uint64_t seed) {
  // a copy without spare memory behind it, so that a sanitizer notices a read after its end
  const std::string exact(bytes);
  const std::unique_ptr<char[]> memory(new char[exact.size()]);
  std::memcpy(memory.get(), exact.data(), exact.size());
  const std::optional<LookupFields> fast = read_lookup({memory.get(), exact.size()});
  if (!fast) return false;
  const Result<FromNode> slow = parse<FromNode>(bytes);
  const auto* lookup = slow ? std::get_if<Lookup>(&*slow) : nullptr;
  EXPECT_NE(lookup, nullptr) << "only the fast reader takes it, seed " << seed;
  if (lookup == nullptr) return true;
  EXPECT_EQ(fast->incarnation, lookup->incarnation) << "seed " << seed;
  EXPECT_EQ(fast->token, lookup->token) << "seed " << seed;
  EXPECT_EQ(copy(fast->query.keys), lookup->keys.keys) << "seed " << seed;
  EXPECT_EQ(copy(fast->query.tail_groups), lookup->tail_groups.keys) << "seed " << seed;
  EXPECT_EQ(copy(fast->query.exact_tails), lookup->exact_tails.keys) << "seed " << seed;
  return true;
}

TEST(ControllerWireLookup, WhatOurClientWritesIsReadWithoutAnObjectInBetween) {
  for (std::uint64_t seed = 1; seed <= 2000; ++seed) {
    const std::string bytes = encode(Dice(seed).lookup());
    ASSERT_TRUE(agrees(bytes, seed)) << "seed " << seed;
    ASSERT_FALSE(read_lookup(std::string_view(bytes).substr(0, bytes.size() - 1))) << "cut short";
    ASSERT_FALSE(read_lookup(bytes + '\0')) << "one byte more";
    if (HasFailure()) return;
  }
}

TEST(ControllerWireLookup, OfChangedBytesBothReadersSayTheSame) {
  std::uint64_t num_read = 0, num_left = 0;
  for (std::uint64_t seed = 1; seed <= 40'000 && !HasFailure(); ++seed) {
    Dice dice(seed);
    std::string bytes = encode(dice.lookup());
    for (std::uint64_t i = 1 + dice.draw(3); i > 0; --i) {
      // Mostly changes bytes of the structure, and seldom bytes of the keys.
      const std::size_t at =
          dice.draw(4) == 0 ? dice.draw(bytes.size()) : dice.draw(std::min<std::size_t>(bytes.size(), 32));
      const std::uint64_t how = dice.draw(4);
      if (how == 0) bytes[at] = static_cast<char>(dice.draw(256));
      if (how == 1) bytes[at] = static_cast<char>(bytes[at] ^ (1 << dice.draw(8)));
      if (how == 2) bytes.erase(at, 1 + dice.draw(3));
      if (how == 3) bytes.insert(at, 1, static_cast<char>(dice.draw(256)));
      if (bytes.empty()) bytes = "\x96";
    }
    ++(agrees(bytes, seed) ? num_read : num_left);
  }
  EXPECT_GT(num_read, 1000U);
  EXPECT_GT(num_left, 1000U);
}

TEST(ControllerWireLookup, OfRandomBytesBothReadersSayTheSame) {
  for (std::uint64_t seed = 1; seed <= 200'000 && !HasFailure(); ++seed) {
    Dice dice(seed);
    std::string bytes(dice.draw(60), '\0');
    for (char& byte : bytes) byte = static_cast<char>(dice.draw(256));
    if (bytes.size() > 5 && dice.draw(2) == 0) bytes.replace(0, 4, "\x96\x92\x01\x08");
    agrees(bytes, seed);
  }
}

TEST(ControllerWireLookup, OtherMessagesAndOtherShapesAreLeftToTheOtherReader) {
  EXPECT_FALSE(read_lookup(encode(Heartbeat{})));
  EXPECT_FALSE(read_lookup(encode(Evict{.keys = {keys_of(0, 3)}})));
  EXPECT_FALSE(read_lookup(""));
  Lookup of_another_version;
  of_another_version.header.version = 2;
  EXPECT_FALSE(read_lookup(encode(of_another_version)));
}

TEST(ControllerWireLookup, AnAnswerIsTheSameBytesAsAMessageMadeOfIt) {
  NodeInfo a = node_info("a", 7), b = node_info(std::string(300, 'b'), ~std::uint64_t{0});
  a.details.member = "m";
  const std::vector<ChunkEntry> tails{tail_chunk(1, 2, 40), tail_chunk(3, 4, 3)};
  const std::vector<HolderView> found{{&a, 200, {}, Tier::kGpu, true, 0}, {&b, 70'000, tails, Tier::kRemote, false, 0}};
  LookupReply message{.token = 1ULL << 40, .holders = {}, .index_version = 300};
  for (const HolderView& holder : found) {
    message.holders.push_back({holder.info->engine_id,
                               holder.info->incarnation,
                               holder.info->endpoint,
                               holder.num_full_chunks,
                               {holder.tails.begin(), holder.tails.end()},
                               holder.tier,
                               holder.confirmed,
                               holder.info->details.member});
  }
  msgpack::sbuffer buffer;
  for (int i = 0; i < 2; ++i) {
    write_reply(buffer, kProtocolVersion, message.token, found, message.index_version);
    EXPECT_EQ(std::string(buffer.data(), buffer.size()), encode(message)) << "also the second time";
  }
  write_reply(buffer, kProtocolVersion, 5, {}, 0);
  EXPECT_EQ(std::string(buffer.data(), buffer.size()), encode(LookupReply{.token = 5}));
}

}  // namespace
}  // namespace kvferry::controller::wire
