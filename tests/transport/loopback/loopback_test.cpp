// Tests what only the loopback fabric has: faults, steps and seeds. The contract suite tests what all backends have.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/transport/loopback/loopback_fabric.h"

namespace kvferry {
namespace {

using ::testing::ElementsAre;
using ::testing::Field;
using ::testing::IsEmpty;

/// Two transports, each with a region of 64 bytes; the reader pulls from the holder.
struct Pair {
  explicit Pair(LoopbackOptions options) : fabric(options) {
    peer = reader->connect(holder->address()).value();
    local = reader->register_region(read.data(), read.size()).value();
    remote = holder->export_region(holder->register_region(held.data(), held.size()).value()).value();
  }
  TransferId pull(std::vector<CopyRange> ranges, Priority priority = Priority::kNormal, bool is_fed = false) {
    return reader->submit({peer, Direction::kPull, local, remote, std::move(ranges), "done", priority, is_fed}).value();
  }
  LoopbackFabric fabric;
  std::unique_ptr<Transport> reader = fabric.make_transport();
  std::unique_ptr<Transport> holder = fabric.make_transport();
  std::vector<std::byte> read = std::vector<std::byte>(64, std::byte{0});
  std::vector<std::byte> held = std::vector<std::byte>(64, std::byte{7});
  PeerId peer;
  RegionId local;
  std::string remote;
};

TEST(Loopback, AHeldFabricMovesOneThingPerStep) {
  Pair pair({.held = true});
  const TransferId id = pair.pull({{0, 0, 1}, {10, 10, 1}});
  EXPECT_EQ(pair.read[0], std::byte{0});
  ASSERT_TRUE(pair.fabric.step());
  EXPECT_EQ(pair.read[0], std::byte{7});
  EXPECT_EQ(pair.read[10], std::byte{0});
  ASSERT_TRUE(pair.fabric.step());
  EXPECT_EQ(pair.read[10], std::byte{7});
  EXPECT_THAT(pair.holder->poll_notifications(), IsEmpty());
  EXPECT_THAT(pair.reader->poll(), IsEmpty());
  ASSERT_TRUE(pair.fabric.step());
  EXPECT_EQ(pair.holder->poll_notifications().size(), 1U);
  EXPECT_THAT(pair.reader->poll(), ElementsAre(Completion{id, ErrorCode::kOk, ""}));
  EXPECT_FALSE(pair.fabric.step());
}

TEST(Loopback, APeerKilledBetweenStepsLeavesThePrefixThatWasCopied) {
  Pair pair({.held = true});
  const TransferId id = pair.pull({{0, 0, 1}, {10, 10, 1}});
  pair.fabric.step();
  pair.fabric.kill(pair.holder->address());
  EXPECT_FALSE(pair.fabric.step());
  EXPECT_EQ(pair.read[0], std::byte{7});
  EXPECT_EQ(pair.read[10], std::byte{0});
  EXPECT_THAT(pair.reader->poll(), ElementsAre(Completion{id, ErrorCode::kPeerLost, "the peer is gone"}));
}

TEST(Loopback, AKilledTransportEndsItsOwnTransfersAndRefusesNewOnes) {
  Pair pair({.held = true});
  const TransferId id = pair.pull({{0, 0, 1}});
  pair.fabric.kill(pair.reader->address());
  EXPECT_THAT(pair.reader->poll(), ElementsAre(Completion{id, ErrorCode::kCancelled, "the transport is shut down"}));
  EXPECT_FALSE(pair.reader->connect(pair.holder->address()));
}

TEST(Loopback, FailNextLosesThePeerAndEverythingInFlightWithIt) {
  Pair pair({.held = true});
  pair.fabric.fail_next(1);
  pair.pull({{0, 0, 1}});
  pair.pull({{1, 1, 1}});
  pair.fabric.release();
  EXPECT_EQ(pair.reader->poll().size(), 2U);
  const PeerId again = pair.reader->connect(pair.holder->address()).value();
  EXPECT_NE(again, pair.peer);
  pair.peer = again;
  pair.pull({{0, 0, 1}});
  EXPECT_THAT(pair.reader->poll(), ElementsAre(Field(&Completion::code, ErrorCode::kOk)));
}

TEST(Loopback, DelaysKeepTheCompletionBackAfterTheLastCopy) {
  Pair pair({.seed = 3, .delay_steps_max = 50, .held = true});
  pair.pull({{0, 0, 1}});
  pair.fabric.step();
  EXPECT_EQ(pair.read[0], std::byte{7});
  int num_steps = 0;
  while (pair.reader->poll().empty()) {
    ASSERT_TRUE(pair.fabric.step());
    ++num_steps;
  }
  EXPECT_GT(num_steps, 1);
}

TEST(Loopback, StepsGoToTheMostUrgentThatCanMove) {
  Pair pair({.held = true});
  const TransferId background = pair.pull({{0, 0, 1}, {10, 10, 1}}, Priority::kBackground);
  ASSERT_TRUE(pair.fabric.step());
  const TransferId normal = pair.pull({{20, 20, 1}});
  const TransferId urgent = pair.pull({{30, 30, 1}}, Priority::kUrgent);
  const TransferId fed = pair.pull({}, Priority::kUrgent, true);
  for (int step = 0; step < 6; ++step) ASSERT_TRUE(pair.fabric.step());
  EXPECT_FALSE(pair.fabric.step()) << "one waits to be fed";
  const std::vector<Completion> completions = pair.reader->poll();
  ASSERT_EQ(completions.size(), 3U);
  EXPECT_EQ(completions[0].id, urgent);
  EXPECT_EQ(completions[1].id, normal);
  EXPECT_EQ(completions[2].id, background);
  EXPECT_TRUE(pair.reader->feed(fed, {{40, 40, 1}}, {}, true));
  while (pair.fabric.step()) continue;
  EXPECT_THAT(pair.reader->poll(), ElementsAre(Completion{fed, ErrorCode::kOk, ""}));
}

std::vector<Completion> outcome_of_a_seed(std::uint64_t seed) {
  Pair pair({.seed = seed, .loss_rate = 0.2, .delay_steps_max = 4, .held = true});
  std::vector<Completion> outcome;
  for (std::uint64_t round = 0; round < 20; ++round) {
    pair.peer = pair.reader->connect(pair.holder->address()).value();
    for (std::uint64_t index = 0; index < 5; ++index) pair.pull({{index, index, 1}, {index + 20, index + 30, 1}});
    while (pair.fabric.step()) continue;
    for (const Completion& completion : pair.reader->poll()) outcome.push_back(completion);
  }
  return outcome;
}

TEST(Loopback, OneSeedGivesOneRunWithLossesAndSuccesses) {
  const std::vector<Completion> first = outcome_of_a_seed(5);
  EXPECT_EQ(first.size(), 100U);
  EXPECT_EQ(first, outcome_of_a_seed(5));
  EXPECT_NE(first, outcome_of_a_seed(6));
  const auto is_ok = [](const Completion& completion) { return completion.code == ErrorCode::kOk; };
  EXPECT_TRUE(std::any_of(first.begin(), first.end(), is_ok));
  EXPECT_FALSE(std::all_of(first.begin(), first.end(), is_ok));
}

TEST(Loopback, TransportsMayOutliveTheirFabric) {
  auto fabric = std::make_unique<LoopbackFabric>();
  const std::unique_ptr<Transport> transport = fabric->make_transport();
  fabric.reset();
  EXPECT_TRUE(transport->connect(transport->address()));
}

}  // namespace
}  // namespace kvferry
