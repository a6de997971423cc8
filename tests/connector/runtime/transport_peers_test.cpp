// Tests that peers of ended processes and idle peers are disconnected, and peers with running transfers are not.
#include "connector/runtime/worker/transport_peers.h"

#include <gtest/gtest.h>

#include <vector>

#include "tests/manual_clock.h"
#include "tests/transport/loopback/loopback_fabric.h"

namespace kvferry {
namespace {

class TransportPeersTest : public ::testing::Test {
 protected:
  TransportPeersTest() : TransportPeersTest(LoopbackOptions{}) {}
  void start_remote() {
    remote_ = fabric_.make_transport();
    remote_region_ = remote_->export_region(remote_->register_region(there_.data(), there_.size()).value()).value();
  }
  Result<TransferId> submit() {
    return peers_.submit(remote_->address(), {{}, Direction::kPull, region_, remote_region_, {{0, 0, 64}}, ""});
  }
  ErrorCode complete_one() {
    const std::vector<Completion> completions = transport_->poll();
    EXPECT_EQ(completions.size(), 1U);
    for (const Completion& one : completions) peers_.completed(one);
    return completions.empty() ? ErrorCode::kInternal : completions[0].code;
  }

  explicit TransportPeersTest(const LoopbackOptions& options) : fabric_(options) {
    region_ = transport_->register_region(memory_.data(), memory_.size()).value();
    start_remote();
  }

  LoopbackFabric fabric_;
  /// Pulls 64 bytes within `time`, and returns the limit.
  std::uint32_t limit_after(TimeNs time) {
    EXPECT_TRUE(submit());
    clock_.advance(time);
    return peers_.completed(transport_->poll().at(0));
  }

  std::vector<std::byte> memory_ = std::vector<std::byte>(64), there_ = std::vector<std::byte>(64);
  std::unique_ptr<Transport> transport_ = fabric_.make_transport(), remote_;
  RegionId region_;
  std::string remote_region_;
  ManualClock clock_;
  TransportPeers peers_{*transport_, clock_};
};

TEST_F(TransportPeersTest, APathThatWasNotMeasuredHasNoLimit) { EXPECT_EQ(limit_after(1), 0u); }

class MeasuredPeers : public TransportPeersTest {
 protected:
  MeasuredPeers() : TransportPeersTest({.measured_rate = 5e9}) {}
};

TEST_F(MeasuredPeers, TheLimitOfAPathIsWhatWasMeasuredOrTheFastestTransfer) {
  EXPECT_EQ(limit_after(64), 5000u);  // one byte a nanosecond is 1000 MB/s
  EXPECT_EQ(limit_after(8), 8000u);
  EXPECT_EQ(limit_after(64), 8000u);
  fabric_.fail_next(1);
  EXPECT_EQ(limit_after(1), 8000u) << "a transfer that failed has no rate";
}

TEST_F(TransportPeersTest, ALostPeerIsDisconnectedWithItsLastTransfer) {
  for (int incarnation = 0; incarnation < 3; ++incarnation) {
    ASSERT_TRUE(submit());
    EXPECT_EQ(complete_one(), ErrorCode::kOk);
    EXPECT_EQ(peers_.size(), 1U);
    fabric_.hold();
    ASSERT_TRUE(submit());
    ASSERT_TRUE(submit());
    fabric_.kill(remote_->address());
    std::vector<Completion> completions = transport_->poll();
    ASSERT_EQ(completions.size(), 2U);
    peers_.completed(completions[0]);
    EXPECT_EQ(peers_.size(), 1U);
    peers_.completed(completions[1]);
    EXPECT_EQ(peers_.size(), 0U);
    fabric_.release();
    start_remote();
  }
  const PeerId next = transport_->connect(remote_->address()).value();
  for (std::uint32_t old = 1; old < next.value; ++old)
    EXPECT_EQ(transport_->submit({PeerId{old}, Direction::kPull, region_, remote_region_, {}, ""}).error().code,
              ErrorCode::kInvalidArgument)
        << "peer " << old << " is still known to the transport";
}

TEST_F(TransportPeersTest, AnIdlePeerIsDisconnectedAndABusyOneIsNot) {
  ASSERT_TRUE(submit());
  clock_.advance(TransportPeers::kIdlePeerNs);
  peers_.expire();
  EXPECT_EQ(peers_.size(), 1U) << "its transfer has no completion yet";
  EXPECT_EQ(complete_one(), ErrorCode::kOk);
  clock_.advance(TransportPeers::kIdlePeerNs - 1);
  peers_.expire();
  EXPECT_EQ(peers_.size(), 1U);
  clock_.advance(TransportPeers::kIdlePeerNs / 16);
  peers_.expire();
  EXPECT_EQ(peers_.size(), 0U);
  ASSERT_TRUE(submit());
  EXPECT_EQ(complete_one(), ErrorCode::kOk);
}

TEST_F(TransportPeersTest, BeyondTheirLimitTheLongestIdlePeerIsDisconnected) {
  constexpr std::size_t kMax = 3;
  TransportPeers few(*transport_, clock_, kMax);
  std::vector<std::unique_ptr<Transport>> others;
  fabric_.hold();
  // This transfer runs all the time.
  ASSERT_TRUE(few.submit(remote_->address(), {{}, Direction::kPull, region_, remote_region_, {{0, 0, 64}}, ""}));
  for (std::size_t i = 0; i < 4 * kMax; ++i) {
    clock_.advance(1);
    others.push_back(fabric_.make_transport());
    EXPECT_TRUE(few.path_between(others.back()->address(), region_, remote_region_));
    EXPECT_LE(few.size(), kMax);
  }
  fabric_.release();
  const std::vector<Completion> completions = transport_->poll();
  ASSERT_EQ(completions.size(), 1U);
  EXPECT_EQ(completions[0].code, ErrorCode::kOk) << "its peer was not disconnected";
  few.completed(completions[0]);
  EXPECT_EQ(few.size(), kMax);
}

}  // namespace
}  // namespace kvferry
