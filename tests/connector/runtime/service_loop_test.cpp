// Tests the service thread, with a transport and a store that decides where chunks land and when they are complete.
#include "connector/runtime/worker/service_loop.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>

#include <cstring>
#include <limits>

#include "connector/runtime/links/node_wire.h"
#include "connector/runtime/links/zmq_link.h"
#include "tests/transport/loopback/loopback_fabric.h"
#include "transport/base/checksum.h"

namespace kvferry {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr std::uint64_t kChunkBytes = 64;
constexpr std::uint32_t kTokens = 8;

/// Even slots land in one region, odd slots in another, and slot 5 can't land. The test decides when landed chunks are
/// reported.
class TwoPlaces final : public ChunkStore {
 public:
  TwoPlaces(RegionId even, RegionId odd) : even_(even), odd_(odd) {}
  std::string describe() const override { return {}; }
  void save(const std::vector<SaveJob>&, DeviceStream) override {}
  std::vector<SaveDone> take_saved() override { return {}; }
  void load(std::vector<LoadJob>, const IsReadable&, DeviceStream) override {}
  std::vector<Loaded> take_loaded() override { return {}; }
  Result<Place> land(ChunkRef chunk, std::uint64_t) override {
    if (chunk.slot == 5) return Error{ErrorCode::kFull, "slot 5 is fenced"};
    return Place{chunk.slot % 2 == 0 ? even_ : odd_, chunk.slot * kChunkBytes};
  }
  void landed(std::span<const Landed> chunks) override {
    const std::lock_guard lock(mutex_);
    landed_.insert(landed_.end(), chunks.begin(), chunks.end());
  }
  std::vector<Landed> take_landed() override {
    const std::lock_guard lock(mutex_);
    if (!tells_) return {};
    return std::exchange(landed_, {});
  }
  std::size_t num_fenced() const override { return 0; }

  std::size_t num_landed() const {
    const std::lock_guard lock(mutex_);
    return landed_.size();
  }
  void tell() {
    const std::lock_guard lock(mutex_);
    tells_ = true;
  }

 private:
  RegionId even_, odd_;
  mutable std::mutex mutex_;
  bool tells_ = false;
  std::vector<Landed> landed_;
};

class Pulls : public ::testing::Test {
 protected:
  Pulls() : holder_(fabric_.make_transport()), here_(fabric_.make_transport()) {
    for (std::size_t i = 0; i < theirs_.size(); ++i) theirs_[i] = static_cast<std::byte>(i * 7);
    const RegionId pool = holder_->register_region(theirs_.data(), theirs_.size()).value();
    remote_ = holder_->export_region(pool).value();
    store_ = std::make_unique<TwoPlaces>(here_->register_region(even_.data(), even_.size()).value(),
                                         here_->register_region(odd_.data(), odd_.size()).value());
    loop_ =
        ServiceLoop::start(
            {*here_, *store_, core_, clock_, even_, {}, kChunkBytes, kChunkBytes / kTokens, {kChunkBytes / kTokens}})
            .value();
    link_ = ClientSocket::connect(loop_->endpoint()).value();
  }
  ~Pulls() override { loop_->shutdown(); }

  PullItem item(std::uint32_t from, std::uint32_t to) {
    const auto sum = chunk_checksum(std::span(theirs_).subspan(from * kChunkBytes, kChunkBytes));
    return {{from, 1}, {to, 1}, kTokens, {sum}};
  }
  /// Returns a pull of a chunk that consists of two halves from different sources, whose slots have half the size.
  PullItem halves(std::uint32_t from, std::uint32_t to) {
    const auto half = [&](std::uint32_t slot) {
      return chunk_checksum(std::span(theirs_).subspan(slot * kChunkBytes / 2, kChunkBytes / 2));
    };
    return {{from, 1}, {to, 1}, kTokens, {}, {{half(from), half(from)}}};
  }
  void order_halves(std::vector<PullItem> items, const std::string& second_address) {
    PullOrder order{1, {}, {}, 5000, std::move(items)};
    order.sources = {{holder_->address(), remote_, kChunkBytes / 2}, {second_address, remote_, kChunkBytes / 2}};
    order.runs = {{1, 0, 0, 1}, {0, 0, 1, 1}};
    order.num_cells = 2;
    EXPECT_TRUE(link_->send(seal(1, order)));
  }
  void order(std::vector<PullItem> items) {
    EXPECT_TRUE(link_->send(seal(1, PullOrder{1, holder_->address(), remote_, 5000, std::move(items)})));
  }
  std::optional<PullOutcome> outcome(int patience_ms) {
    for (; patience_ms > 0; patience_ms -= 10) {
      if (auto bytes = link_->receive())
        return decode<PullOutcome>(decode<Envelope>(*bytes, "message")->body, "outcome").value();
      pollfd fd{link_->fd(), POLLIN, 0};
      ::poll(&fd, 1, 10);
    }
    return std::nullopt;
  }

  std::vector<std::byte> theirs_ = std::vector<std::byte>(8 * kChunkBytes);
  std::vector<std::byte> even_ = theirs_, odd_ = theirs_;
  LoopbackFabric fabric_;
  std::unique_ptr<Transport> holder_, here_;
  std::string remote_;
  SharedWorkerCore core_{0, 8};
  std::unique_ptr<TwoPlaces> store_;
  SteadyClock clock_;
  std::unique_ptr<ServiceLoop> loop_;
  std::unique_ptr<ClientSocket> link_;
};

TEST_F(Pulls, EndWhenTheStoreHasAllChunksAndNotBefore) {
  order({item(0, 2), item(1, 3), item(2, 4)});
  for (int i = 0; i < 1000 && store_->num_landed() < 3; ++i) ::poll(nullptr, 0, 10);
  EXPECT_EQ(store_->num_landed(), 3u);
  EXPECT_FALSE(outcome(100)) << "reported before others can read it";
  store_->tell();
  const auto done = outcome(10'000);
  ASSERT_TRUE(done);
  EXPECT_THAT(done->ok, ElementsAre(true, true, true));
  EXPECT_GT(done->post, 0);
  EXPECT_GE(done->unpack, 100 * kMillisecond) << "the store has told 100 ms after the last byte or later";
  EXPECT_EQ(std::memcmp(&even_[2 * kChunkBytes], &theirs_[0], kChunkBytes), 0);
  EXPECT_EQ(std::memcmp(&odd_[3 * kChunkBytes], &theirs_[1 * kChunkBytes], kChunkBytes), 0);
  EXPECT_EQ(std::memcmp(&even_[4 * kChunkBytes], &theirs_[2 * kChunkBytes], kChunkBytes), 0);
}

TEST_F(Pulls, AChunkThatCantLandOrIsDamagedFailsAlone) {
  store_->tell();
  PullItem damaged = item(2, 6);
  damaged.checksums[0] += 1;
  PullItem without = item(3, 7);
  without.checksums.clear();
  ::testing::internal::CaptureStderr();
  order({item(0, 2), item(1, 5), damaged, without, item(4, 3)});
  const auto done = outcome(10'000);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), HasSubstr("3 of 5 chunks of pull 1 failed: "));
  ASSERT_TRUE(done);
  EXPECT_THAT(done->ok, ElementsAre(true, false, false, false, true));
  EXPECT_FALSE(done->what.empty());
}

TEST_F(Pulls, ChunksOfSeveralSourcesAreVerifiedRunByRunAndHashedAsAWhole) {
  store_->tell();
  PullItem damaged = halves(3, 4);
  damaged.run_checksums[0][1] += 1;
  PullItem without = halves(3, 6);
  without.run_checksums[0].pop_back();
  order_halves({halves(2, 2), damaged, without, halves(5, 0)}, holder_->address());
  const auto done = outcome(10'000);
  ASSERT_TRUE(done);
  EXPECT_THAT(done->ok, ElementsAre(true, false, false, true));
  ASSERT_EQ(done->checksums.size(), 4u);
  for (const auto& [item, from, to] : {std::tuple(0, 2, 2), std::tuple(3, 5, 0)}) {
    const auto got = std::span(even_).subspan(to * kChunkBytes, kChunkBytes);
    EXPECT_EQ(std::memcmp(&got[0], &theirs_[from * kChunkBytes / 2], kChunkBytes / 2), 0);
    EXPECT_EQ(std::memcmp(&got[kChunkBytes / 2], &theirs_[from * kChunkBytes / 2], kChunkBytes / 2), 0);
    EXPECT_EQ(done->checksums[item], chunk_checksum(got));
  }
}

TEST_F(Pulls, AChunkOfSeveralSourcesFailsWithOneOfThem) {
  store_->tell();
  order_halves({halves(2, 2), halves(3, 4)}, "nobody's address");
  const auto done = outcome(10'000);
  ASSERT_TRUE(done);
  EXPECT_THAT(done->ok, ElementsAre(false, false));
}

TEST_F(Pulls, RunsAreHashedForReadersOfOtherShapesAndDamageIsFound) {
  core_.locked([](WorkerCore& core) {
    for (const std::uint32_t slot : {2u, 4u}) {
      core.begin_write({slot, 1});
      core.end_write({slot, 1}, true);
    }
  });
  const auto chunk = [&](std::uint32_t slot) { return std::span(even_).subspan(slot * kChunkBytes, kChunkBytes); };
  const auto right = chunk_checksum(chunk(2));
  const ChecksumOrder order{
      7,    4, {{0, 0, 0, 1}, {0, 0, 0, 2}, {0, 3, 0, 1}}, {{{2, 1}, 8, right}, {{4, 1}, 8, 1}, {{2, 2}, 8, right}},
      5000, 0};
  ASSERT_TRUE(link_->send(seal(7, order)));
  std::vector<ChecksumOutcome> outcomes;
  for (int patience = 0; patience < 1000 && outcomes.size() < 3; ++patience) {
    if (auto bytes = link_->receive())
      outcomes.push_back(decode<ChecksumOutcome>(decode<Envelope>(*bytes, "message")->body, "checksums").value());
    else
      ::poll(nullptr, 0, 10);
  }
  ASSERT_EQ(outcomes.size(), 3u);
  EXPECT_TRUE(outcomes[0].ok);
  EXPECT_THAT(outcomes[0].checksums, ElementsAre(chunk_checksum(chunk(2).first(16)), chunk_checksum(chunk(2).first(32)),
                                                 chunk_checksum(chunk(2).subspan(48))));
  EXPECT_FALSE(outcomes[1].ok);  // the checksum is wrong
  EXPECT_EQ(outcomes[1].item, 1u);
  EXPECT_FALSE(outcomes[2].ok);  // the generation is wrong
}

TEST_F(Pulls, OutcomesOfPushesCarryTheirSendersVersions) {
  ASSERT_TRUE(link_->send(seal(3, PushOrder{3, {}, {""}})));
  ASSERT_TRUE(link_->send(seal(3, PushStart{3, 0, {2, 1}, kTokens, {1}})));  // the other node does not want this chunk
  std::optional<std::string> bytes;
  for (int patience = 0; patience < 1000 && !bytes; ++patience) {
    bytes = link_->receive();
    if (!bytes) ::poll(nullptr, 0, 10);
  }
  ASSERT_TRUE(bytes);
  const Envelope envelope = decode<Envelope>(*bytes, "message").value();
  EXPECT_EQ(envelope.type, kMessageType<PushOutcome>);
  EXPECT_EQ(envelope.oldest, kNodeWire.oldest);
  EXPECT_EQ(envelope.newest, kNodeWire.newest);
  EXPECT_EQ(envelope.release, version());
  EXPECT_FALSE(decode<PushOutcome>(envelope.body, "outcome")->ok);
}

TEST_F(Pulls, APushThatCantBeStartedEndsAtOnceWithTheReason) {
  constexpr auto kMost = std::numeric_limits<std::uint32_t>::max();
  const std::pair<PushStart, const char*> orders[] = {{{3, 0, {kMost, 1}, kTokens, {1}}, "slot 4294967295"},
                                                      {{3, 1, {2, 1}, kTokens + 1, {1}}, "too small"},
                                                      {{3, 2, {2, 1}, kTokens, {}}, "no checksum of rank 0"}};
  for (const auto& [order, reason] : orders) {
    ASSERT_TRUE(link_->send(seal(3, order)));
    std::optional<std::string> bytes;
    for (int patience = 0; patience < 1000 && !bytes; ++patience) {
      bytes = link_->receive();
      if (!bytes) ::poll(nullptr, 0, 10);
    }
    ASSERT_TRUE(bytes) << reason;
    const PushOutcome ended = decode<PushOutcome>(decode<Envelope>(*bytes, "message")->body, "outcome").value();
    EXPECT_EQ(ended.push, 3u);
    EXPECT_EQ(ended.index, order.index);
    EXPECT_FALSE(ended.ok);
    EXPECT_THAT(ended.what, HasSubstr(reason));
  }
}

TEST_F(Pulls, OrdersWithNumbersThatCantBeRightFailAndTheNextOneIsCarriedOut) {
  store_->tell();
  std::uint64_t generation = 0;
  const auto refused = [&](const auto& change) {
    PullOrder bad{1, {}, {}, 5000, {halves(2, 2)}};
    bad.sources = {{holder_->address(), remote_, kChunkBytes / 2}, {holder_->address(), remote_, kChunkBytes / 2}};
    bad.runs = {{1, 0, 0, 1}, {0, 0, 1, 1}};
    bad.num_cells = 2;
    // otherwise the order would be refused because of the slot, and not because of the numbers
    bad.items[0].local.generation = ++generation;
    change(bad);
    EXPECT_TRUE(link_->send(seal(1, bad)));
    const auto done = outcome(10'000);
    ASSERT_TRUE(done);
    EXPECT_THAT(done->ok, ElementsAre(false));
    EXPECT_FALSE(done->what.empty());
  };
  constexpr auto kMost = std::numeric_limits<std::uint32_t>::max();
  constexpr auto kMost64 = std::numeric_limits<std::uint64_t>::max();
  refused([](PullOrder& order) { order.items[0].local.slot = kMost; });
  refused([](PullOrder& order) { order.items[0].local.slot = 8; });
  refused([](PullOrder& order) { order.items[0].num_tokens = kTokens + 1; });
  refused([](PullOrder& order) { order.items[0].num_tokens = kMost; });
  refused([](PullOrder& order) { order.num_cells = 0; });
  refused([](PullOrder& order) { order.runs.clear(), order.num_cells = 0; });
  refused([](PullOrder& order) { order.runs[1].holder = 2; });
  refused([](PullOrder& order) { order.runs[1].holder = kMost; });
  refused([](PullOrder& order) { order.runs[1].target = 2; });
  refused([](PullOrder& order) { order.runs[1].cells = kMost64; });
  refused([](PullOrder& order) { order.runs[1].target = kMost64; });
  refused([](PullOrder& order) { order.runs[1].source = kMost64; });
  refused([](PullOrder& order) { order.timeout_ms = 0; });
  PullItem good = halves(2, 2);
  good.local.generation = ++generation;
  order_halves({good}, holder_->address());
  const auto done = outcome(10'000);
  ASSERT_TRUE(done);
  EXPECT_THAT(done->ok, ElementsAre(true));
}

TEST_F(Pulls, ASlotThatCannotBeGrantedIsToldWithTheReason) {
  ::testing::internal::CaptureStderr();
  ASSERT_TRUE(link_->send(seal(5, GrantOrder{5, {{0, {5, 1}, kTokens}}})));
  std::optional<std::string> bytes;
  for (int patience = 0; patience < 1000 && !(bytes = link_->receive()); ++patience) ::poll(nullptr, 0, 10);
  const std::string told = ::testing::internal::GetCapturedStderr();
  ASSERT_TRUE(bytes);
  EXPECT_THAT(decode<GrantOutcome>(decode<Envelope>(*bytes, "message")->body, "outcome")->grants, ElementsAre(""));
  EXPECT_THAT(told, HasSubstr("slot 5 can't be granted to a node that pushes"));
  EXPECT_THAT(told, HasSubstr("(1 such slots so far): slot 5 is fenced"));
}

TEST_F(Pulls, OrdersThatNameSlotsThatAreNotThereAreRefused) {
  constexpr auto kMost = std::numeric_limits<std::uint32_t>::max();
  ASSERT_TRUE(link_->send(seal(7, ChecksumOrder{7, 4, {{0, 4, 0, std::uint64_t{0} - 4}}, {{{2, 1}, 8, 1}}, 5000, 0})));
  ASSERT_TRUE(
      link_->send(seal(7, ChecksumOrder{7, 4, {{0, 0, 0, 1}}, {}, std::numeric_limits<std::int64_t>::max(), 0})));
  // Chunk 0 is granted twice. Chunks 1 to 3 are not in the pool, or are too long for their slot.
  const GrantOrder grants{
      5, {{0, {2, 1}, kTokens}, {0, {4, 1}, kTokens}, {1, {kMost, 1}, kTokens}, {2, {8, 1}, 1}, {3, {6, 1}, kMost}}};
  ASSERT_TRUE(link_->send(seal(5, grants)));
  std::vector<Envelope> envelopes;
  const auto wait_for = [&](std::size_t num) {
    for (int patience = 0; patience < 1000 && envelopes.size() < num; ++patience) {
      if (auto bytes = link_->receive())
        envelopes.push_back(decode<Envelope>(*bytes, "message").value());
      else
        ::poll(nullptr, 0, 10);
    }
    ASSERT_EQ(envelopes.size(), num);
  };
  wait_for(1);
  ASSERT_EQ(envelopes[0].type, kMessageType<GrantOutcome>);
  EXPECT_THAT(decode<GrantOutcome>(envelopes[0].body, "outcome")->grants, ElementsAre("", "", "", "", ""));
  // All chunks are revoked, twice and with wrong slots. Each chunk's end must be reported once, with the slot that was
  // granted.
  store_->tell();
  Revocation back{5, 0, {}};
  for (const std::uint32_t index : {0u, 0u, 1u, 2u, 3u, 9u}) back.chunks.push_back({index, {kMost, 7}, false, {}});
  ASSERT_TRUE(link_->send(seal(5, back)));
  std::vector<RevokedChunk> ended;
  for (std::size_t num = 2; ended.size() < 4; ++num) {
    wait_for(num);
    if (HasFatalFailure()) return;
    const Revoked revoked = decode<Revoked>(envelopes.back().body, "outcome").value();
    ended.insert(ended.end(), revoked.chunks.begin(), revoked.chunks.end());
  }
  ASSERT_EQ(ended.size(), 4u);
  for (const RevokedChunk& chunk : ended) {
    EXPECT_FALSE(chunk.ok);
    EXPECT_EQ(chunk.chunk, grants.chunks[chunk.index == 0 ? 0 : chunk.index + 1].chunk);
  }
}

TEST_F(Pulls, ALostPeerFailsAllItsChunks) {
  store_->tell();
  fabric_.fail_next(2);
  order({item(0, 2), item(1, 3)});
  const auto done = outcome(10'000);
  ASSERT_TRUE(done);
  EXPECT_THAT(done->ok, ElementsAre(false, false));
}

}  // namespace
}  // namespace kvferry
