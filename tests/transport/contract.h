// The fixture of the contract suite. The suite tests the promises of transport/transport.h for all backends; each
// contract_*_test.cpp file tests one theme. A new backend needs a struct in backends.h.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <string>
#include <thread>
#include <utility>

#include "tests/transport/loopback/loopback_fixture.h"
#include "tests/transport/process_fixture.h"
#include "transport/base/checksum.h"

namespace kvferry {

template <class... Backends>
::testing::Types<LoopbackFixture, ProcessFixture<Backends>...> fixtures_of(std::tuple<Backends...>);
using Fixtures = decltype(fixtures_of(ProcessBackends()));
struct FixtureNames {
  template <class Backend>
  static std::string GetName(int) {
    return Backend::name();
  }
};

constexpr std::uint64_t kBytes = std::uint64_t{4} << 20;

template <class Backend>
class TransportContract : public ::testing::Test {
 protected:
  void SetUp() override { reset(fixture_.make_transport(1024)); }

  void reset(std::unique_ptr<Transport> transport) {
    transport_ = std::move(transport);
    region_ = transport_->register_region(memory_.data(), memory_.size()).value();
  }
  PagedTransfer pull(const Remote& remote, PeerId peer, std::vector<CopyRange> ranges = {{0, 0, 4096}}) const {
    return {peer, Direction::kPull, region_, remote.region(), std::move(ranges), ""};
  }
  /// Connects to the remote, and checks the connection with one small pull.
  PeerId connect_and_pull(const Remote& remote) {
    const PeerId peer = transport_->connect(remote.address()).value();
    const TransferId id = transport_->submit(pull(remote, peer)).value();
    EXPECT_THAT(wait_completions(*transport_, 1), ::testing::ElementsAre(Completion{id, ErrorCode::kOk, ""}));
    return peer;
  }
  void expect_one(TransferId id, ErrorCode code) {
    const std::vector<Completion> completions = wait_completions(*transport_, 1);
    ASSERT_EQ(completions.size(), 1U) << "no completion in time";
    EXPECT_EQ(completions[0].id, id);
    EXPECT_EQ(completions[0].code, code) << completions[0].what;
    EXPECT_EQ(completions[0].what.empty(), code == ErrorCode::kOk);
  }
  /// Expects the outcome of a transfer that could not continue because the remote is stopped or dead. A backend whose
  /// transfers do not need the remote may also succeed.
  void expect_outcome_without_remote(const Completion& completion, ErrorCode code) const {
    if (completion.code == ErrorCode::kOk && !fixture_.needs_running_remote()) return;
    EXPECT_EQ(completion.code, code) << completion.what;
    EXPECT_FALSE(completion.what.empty());
  }
  void expect_one_without_remote(TransferId id, ErrorCode code) {
    const std::vector<Completion> completions = wait_completions(*transport_, 1);
    ASSERT_EQ(completions.size(), 1U) << "no completion in time";
    EXPECT_EQ(completions[0].id, id);
    expect_outcome_without_remote(completions[0], code);
  }
  /// Expects that the peer is lost. If transfers do not need the remote, some may succeed before this side notices the
  /// loss. Otherwise the first transfer must fail.
  void expect_lost(const Remote& remote, PeerId peer) {
    const auto deadline = std::chrono::steady_clock::now() + kPatience;
    while (std::chrono::steady_clock::now() < deadline) {
      const TransferId id = transport_->submit(pull(remote, peer)).value();
      const std::vector<Completion> completions = wait_completions(*transport_, 1);
      ASSERT_EQ(completions.size(), 1U);
      EXPECT_EQ(completions[0].id, id);
      expect_outcome_without_remote(completions[0], ErrorCode::kPeerLost);
      if (completions[0].code == ErrorCode::kPeerLost) return;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    FAIL() << "the peer's death went unnoticed";
  }
  /// Expects only the notification `body`. A last transfer sends it, so earlier notifications that have not arrived by
  /// then will never arrive.
  void expect_only_note(Remote& remote, PeerId peer, const std::string& body) {
    PagedTransfer fence = pull(remote, peer, {});
    fence.notification = body;
    const TransferId id = transport_->submit(fence).value();
    const std::vector<Notification> notes = remote.wait_notifications(1);
    ASSERT_EQ(notes.size(), 1U);
    EXPECT_EQ(notes[0].body, body);
    expect_one(id, ErrorCode::kOk);
  }
  /// Returns the checksum of each range at its source.
  std::vector<std::uint64_t> checksums_of(const PagedTransfer& transfer, Remote& remote) {
    std::vector<std::uint64_t> checksums;
    for (const CopyRange& range : transfer.ranges) {
      const bool is_pull = transfer.direction == Direction::kPull;
      const std::span<std::byte> source = is_pull ? remote.memory() : std::span<std::byte>(memory_);
      checksums.push_back(
          chunk_checksum(source.subspan(is_pull ? range.remote_offset : range.local_offset, range.bytes)));
    }
    return checksums;
  }
  /// Returns what the destination must contain after the transfer.
  std::vector<std::byte> expected_after(const PagedTransfer& transfer, Remote& remote) {
    const bool is_pull = transfer.direction == Direction::kPull;
    std::vector<std::byte> expected =
        is_pull ? memory_ : std::vector<std::byte>(remote.memory().begin(), remote.memory().end());
    for (const CopyRange& range : transfer.ranges) {
      if (is_pull)
        std::memcpy(expected.data() + range.local_offset, remote.memory().data() + range.remote_offset, range.bytes);
      else
        std::memcpy(expected.data() + range.remote_offset, memory_.data() + range.local_offset, range.bytes);
    }
    return expected;
  }
  /// Ends a test: expects that no transfer completes a second time, not even when the transport ends.
  void expect_nothing_more() {
    transport_->shutdown();
    EXPECT_THAT(transport_->poll(), ::testing::IsEmpty());
  }

  Backend fixture_;
  std::vector<std::byte> memory_ = std::vector<std::byte>(kBytes);
  std::unique_ptr<Transport> transport_;
  RegionId region_;
};

}  // namespace kvferry
