#include "controller/engines/engine_stream.h"

#include <gtest/gtest.h>

#include <deque>
#include <random>
#include <set>

namespace kvferry::controller {
namespace {

/// Records the payloads that were applied and not dropped since.
struct Applied final : EngineStreamSink {
  void apply(std::string_view payload) override { payloads.emplace_back(payload); }
  void drop_everything() override { payloads.clear(); }
  std::vector<std::string> payloads;
};

using Payloads = std::vector<std::string>;

class EngineStreamTest : public testing::Test {
 protected:
  void replay(EngineStream& stream, std::uint64_t from, const Payloads& payloads) {
    for (const std::string& payload : payloads) stream.replayed(from++, payload, now);
    stream.replay_ended(now);
  }
  EngineStream connected() {
    EngineStream stream({}, applied, now);
    stream.connected(now);
    EXPECT_EQ(stream.take_replay_request(), 0U);
    return stream;
  }
  Applied applied;
  TimeNs now = kSecond;
};

TEST_F(EngineStreamTest, AsksForAllOnConnectAndHoldsWhatComesMeanwhile) {
  EngineStream stream = connected();
  stream.received(2, "c", now);
  EXPECT_EQ(applied.payloads, Payloads{});
  replay(stream, 0, {"a", "b", "c"});
  EXPECT_EQ(applied.payloads, (Payloads{"a", "b", "c"}));
  stream.received(3, "d", now);
  EXPECT_EQ(applied.payloads, (Payloads{"a", "b", "c", "d"}));
  EXPECT_TRUE(stream.is_confirmed());
}

TEST_F(EngineStreamTest, AGapIsMadeGoodFromTheBatchBeforeItOn) {
  EngineStream stream = connected();
  replay(stream, 0, {"a", "b"});
  stream.received(3, "d", now);
  EXPECT_FALSE(stream.is_confirmed());
  EXPECT_EQ(stream.take_replay_request(), 1U);
  replay(stream, 1, {"b", "c", "d"});
  EXPECT_EQ(applied.payloads, (Payloads{"a", "b", "c", "d"}));
  EXPECT_EQ(stream.counters().gaps, 1U);
  EXPECT_EQ(stream.counters().restarts, 0U);
}

TEST_F(EngineStreamTest, ASequenceThatGoesBackwardsDropsAllAtOnce) {
  EngineStream stream = connected();
  replay(stream, 0, {"a", "b"});
  stream.received(2, "c", now);
  stream.received(0, "x", now);
  EXPECT_EQ(applied.payloads, Payloads{});
  EXPECT_EQ(stream.take_replay_request(), 0U);
  replay(stream, 0, {"x"});
  EXPECT_EQ(applied.payloads, Payloads{"x"});
  EXPECT_EQ(stream.counters().restarts, 1U);
}

TEST_F(EngineStreamTest, AnotherEngineThatIsFurtherOnIsFoundOut) {
  EngineStream stream = connected();
  replay(stream, 0, {"a", "b"});
  stream.disconnected(now);
  stream.connected(now);
  EXPECT_EQ(stream.take_replay_request(), 1U);
  stream.received(2, "z", now);  // this is the next number, but it comes from another engine
  stream.replayed(1, "y", now);
  EXPECT_EQ(applied.payloads, Payloads{});
  EXPECT_EQ(stream.take_replay_request(), 0U);
  replay(stream, 0, {"x", "y", "z"});
  EXPECT_EQ(applied.payloads, (Payloads{"x", "y", "z"}));
}

TEST_F(EngineStreamTest, AReplayThatWasFasterThanTheSubscriptionIsNoRestart) {
  EngineStream stream = connected();
  replay(stream, 0, {"a", "b", "c"});
  for (const std::uint64_t sequence : {0U, 1U, 2U}) stream.received(sequence, "?", now);
  EXPECT_EQ(stream.counters().duplicates, 3U);
  EXPECT_EQ(stream.counters().restarts, 0U);
  EXPECT_EQ(applied.payloads.size(), 3U);
}

TEST_F(EngineStreamTest, AGapBeyondTheReplaysReachDropsAll) {
  EngineStream stream = connected();
  replay(stream, 0, {"a"});
  stream.received(9, "j", now);
  EXPECT_EQ(stream.take_replay_request(), 0U);
  stream.replayed(8, "i", now);
  EXPECT_EQ(applied.payloads, Payloads{});
  EXPECT_EQ(stream.take_replay_request(), 0U);
  replay(stream, 8, {"i", "j"});
  EXPECT_EQ(applied.payloads, (Payloads{"i", "j"}));
  EXPECT_EQ(stream.counters().gaps_unrepaired, 1U);
}

TEST_F(EngineStreamTest, AReplayThatIsGivenUpMidwayDropsAllAndCountsTheGap) {
  EngineStream stream({.waiting_bytes_max = 10}, applied, now);
  stream.connected(now);
  EXPECT_EQ(stream.take_replay_request(), 0U);
  stream.replayed(0, "a", now);
  EXPECT_EQ(applied.payloads, Payloads{"a"});
  stream.received(7, "more than ten bytes", now);  // so many batches wait that the rest of the replay is given up
  EXPECT_EQ(applied.payloads, Payloads{"more than ten bytes"});
  EXPECT_EQ(stream.counters().gaps_unrepaired, 1U);
}

TEST_F(EngineStreamTest, WithoutAReplayAGapDropsAll) {
  EngineStream stream({.has_replay = false}, applied, now);
  stream.connected(now);
  EXPECT_EQ(stream.take_replay_request(), std::nullopt);
  stream.received(5, "f", now);
  stream.received(6, "g", now);
  stream.received(8, "i", now);
  EXPECT_EQ(applied.payloads, Payloads{"i"});
}

TEST_F(EngineStreamTest, AReplayThatNeverAnswersIsTriedLessAndLessOften) {
  EngineStream stream = connected();
  stream.received(4, "e", now);
  std::size_t num_asked = 1;
  for (int i = 0; i < 600; ++i) {
    now += 100 * kMillisecond;
    stream.received(5 + static_cast<std::uint64_t>(i), "x", now);
    stream.tick(now);
    num_asked += stream.take_replay_request() ? 1 : 0;
  }
  EXPECT_EQ(applied.payloads.size(), 601U);  // the stream goes on without the replay
  EXPECT_GT(num_asked, 5U);
  EXPECT_LT(num_asked, 20U);
}

TEST_F(EngineStreamTest, ALostEngineIsNotCreditedAndComesBackOnlyAsTheSameOne) {
  for (const bool is_same : {true, false}) {
    applied.payloads.clear();
    EngineStream stream = connected();
    replay(stream, 0, {"a", "b"});
    stream.disconnected(now);
    for (int i = 0; i < 32; ++i) stream.tick(now += 100 * kMillisecond);
    EXPECT_FALSE(stream.is_live());
    stream.connected(now);
    EXPECT_FALSE(stream.is_live());
    EXPECT_EQ(stream.take_replay_request(), 1U);
    stream.replayed(1, is_same ? "b" : "x", now);
    EXPECT_TRUE(stream.is_live());
    EXPECT_EQ(applied.payloads.size(), is_same ? 2U : 0U);
  }
}

TEST_F(EngineStreamTest, ASilentEngineIsAskedForASignOfLifeAndLostWithoutOne) {
  EngineStream stream = connected();
  replay(stream, 0, {"a"});
  std::size_t num_probes = 0;
  for (int i = 0; i < 100; ++i) {
    stream.tick(now += 100 * kMillisecond);
    if (stream.take_replay_request()) {
      ++num_probes;
      stream.replay_ended(now);
    }
  }
  EXPECT_GE(num_probes, 8U);
  EXPECT_TRUE(stream.is_live());
  for (int i = 0; i < 32; ++i) stream.tick(now += 100 * kMillisecond);
  EXPECT_FALSE(stream.is_live());
}

TEST_F(EngineStreamTest, AStallOfOursIsNotTheEnginesSilence) {
  EngineStream stream = connected();
  replay(stream, 0, {"a"});
  stream.tick(now);
  stream.tick(now += 20 * kSecond);
  EXPECT_TRUE(stream.is_live());
}

/// Simulates an engine that loses messages, restarts and breaks connections. Whenever the stream is confirmed and no
/// message is on its way, and also at the end, the applied payloads must be those of this incarnation of the engine, in
/// order.
TEST(EngineStream, RandomFaultsHealThemselves) {
  for (std::uint64_t seed = 1; seed <= 300; ++seed) {
    std::mt19937_64 random(seed);
    Applied applied;
    TimeNs now = kSecond;
    EngineStream stream({}, applied, now);
    Payloads said;  // the payloads that this incarnation has sent
    std::deque<std::pair<std::uint64_t, std::string>> on_its_way;
    std::optional<std::uint64_t> asked;
    std::set<std::string> dead;  // the payloads of former incarnations
    unsigned incarnation = 0;
    stream.connected(now);
    for (int step = 0; step < 400; ++step) {
      const bool is_calm = step >= 300;
      now += 20 * kMillisecond;
      switch (random() % (is_calm ? 4 : 24)) {
        default:
          said.push_back(std::to_string(incarnation) + "/" + std::to_string(said.size()));
          if (is_calm || random() % 8 != 0) on_its_way.emplace_back(said.size() - 1, said.back());
          break;
        case 20:
        case 21:
          dead.insert(said.begin(), said.end());
          said.clear();
          ++incarnation;
          on_its_way.clear();
          [[fallthrough]];
        case 22:
          on_its_way.clear();
          asked.reset();
          stream.disconnected(now);
          stream.connected(now);
      }
      for (std::size_t i = random() % 4; i > 0 && !on_its_way.empty(); --i) {
        stream.received(on_its_way.front().first, on_its_way.front().second, now);
        // After the first message of a new incarnation, no payload of a former one may be left.
        for (const std::string& payload : applied.payloads)
          ASSERT_FALSE(stream.is_live() && dead.contains(payload)) << "seed " << seed;
        on_its_way.pop_front();
      }
      if (const auto wanted = stream.take_replay_request()) asked = wanted;
      if (asked && random() % 2 == 0) {
        const std::uint64_t from = *std::exchange(asked, std::nullopt);
        const Payloads then = said;
        bool is_over = false;
        for (std::uint64_t i = from; i < then.size() && !is_over; ++i) {
          stream.replayed(i, then[i], now);
          if (const auto again = stream.take_replay_request()) {
            asked = again;
            is_over = true;
          }
        }
        if (!is_over) stream.replay_ended(now);
      }
      stream.tick(now);
      if (const auto wanted = stream.take_replay_request()) asked = wanted;
    }
    while (!on_its_way.empty()) {
      stream.received(on_its_way.front().first, on_its_way.front().second, now);
      on_its_way.pop_front();
    }
    for (int i = 0; i < 100; ++i) {
      stream.tick(now += 50 * kMillisecond);
      if (const auto wanted = stream.take_replay_request()) {
        for (std::uint64_t k = *wanted; k < said.size(); ++k) stream.replayed(k, said[k], now);
        stream.replay_ended(now);
      }
    }
    ASSERT_EQ(applied.payloads, said) << "seed " << seed;
    ASSERT_TRUE(stream.is_live());
  }
}

}  // namespace
}  // namespace kvferry::controller
