// Tests the promises of the transfer table: accesses, grants, fed ranges.
#include "transport/transfer_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <random>

#include "tests/manual_clock.h"

namespace kvferry {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr std::uint64_t kBytes = 1000;
constexpr std::uint64_t kIncarnation = 5;

ErrorCode code_of(const Result<void>& result) { return result ? ErrorCode::kOk : result.error().code; }
template <class T>
ErrorCode code_of(const Result<T>& result) {
  return result ? ErrorCode::kOk : result.error().code;
}

class TransferTableTest : public ::testing::Test {
 protected:
  TransferTableTest() {
    peer_ = table_.connect("somewhere", kIncarnation).peer;
    region_ = add_region();
  }
  RegionId add_region() {
    const RegionId id = table_.new_region_id();
    table_.add_region(id, MemoryRegion{memory_.data(), kBytes},
                      encode(RegionDescriptor{kIncarnation, 4096, kBytes, "key", id.value}));
    return id;
  }
  GrantId grant(std::uint64_t offset, std::uint64_t bytes) {
    return table_.add_grant(region_, offset, bytes, {}, "k").value();
  }
  PagedTransfer transfer() {
    return {peer_, Direction::kPull, region_, table_.exported(region_).value(), {{0, 0, 10}, {10, 10, 10}}, ""};
  }

  ManualClock clock_;
  TransferTable table_{8, SecretNumbers("secret"), clock_};
  std::vector<std::byte> memory_ = std::vector<std::byte>(kBytes);
  PeerId peer_;
  RegionId region_;
};

TEST_F(TransferTableTest, AGrantsDescriptorNamesItsOwnBounds) {
  const GrantId id = grant(100, 50);
  const RegionDescriptor granted = decode<RegionDescriptor>(table_.exported(id).value(), "grant").value();
  EXPECT_EQ(granted.base, 4096U + 100);
  EXPECT_EQ(granted.bytes, 50U);
  EXPECT_EQ(granted.region, region_.value);
  EXPECT_EQ(granted.grant, id.value);
  EXPECT_EQ(granted.rkey, "k");
  EXPECT_EQ(granted.incarnation, kIncarnation);
}

TEST_F(TransferTableTest, WhatIsBorrowedStaysUntilItIsGivenBack) {
  EXPECT_EQ(table_.begin_access(region_, GrantId{}, 100, 900, false).value(), memory_.data() + 100);
  EXPECT_EQ(table_.begin_access(region_, GrantId{}, 0, 1, false).value(), memory_.data());
  EXPECT_EQ(code_of(table_.remove_region(region_)), ErrorCode::kFull);
  table_.end_access(region_, GrantId{});
  EXPECT_EQ(code_of(table_.remove_region(region_)), ErrorCode::kFull);
  table_.end_access(region_, GrantId{});
  EXPECT_EQ(code_of(table_.remove_region(region_)), ErrorCode::kOk);
  EXPECT_EQ(code_of(table_.begin_access(region_, GrantId{}, 0, 1, false)), ErrorCode::kRefused);
}

TEST_F(TransferTableTest, AProtectedRegionIsWrittenOnlyWithAGrant) {
  const RegionId id = table_.new_region_id();
  MemoryRegion memory{memory_.data(), kBytes};
  memory.needs_grant_to_write = true;
  table_.add_region(id, memory, encode(RegionDescriptor{kIncarnation, 4096, kBytes, "key", id.value}));
  EXPECT_EQ(code_of(table_.begin_access(id, GrantId{}, 0, 1, true)), ErrorCode::kRefused);
  EXPECT_EQ(code_of(table_.begin_access(id, GrantId{}, 0, 1, false)), ErrorCode::kOk);
  const GrantId granted = table_.add_grant(id, 10, 1, {}, "").value();
  EXPECT_EQ(table_.begin_access(id, granted, 0, 1, true).value(), memory_.data() + 10);
}

TEST_F(TransferTableTest, NobodyBorrowsWhatWasNeverOffered) {
  for (const auto& [offset, bytes] : std::vector<std::pair<std::uint64_t, std::uint64_t>>{
           {kBytes, 1}, {0, kBytes + 1}, {1, kBytes}, {~std::uint64_t{0}, 1}, {1, ~std::uint64_t{0}}})
    EXPECT_EQ(code_of(table_.begin_access(region_, GrantId{}, offset, bytes, false)), ErrorCode::kRefused);
  const GrantId id = grant(100, 50);
  for (const auto& [offset, bytes] : std::vector<std::pair<std::uint64_t, std::uint64_t>>{
           {50, 1}, {0, 51}, {49, 2}, {~std::uint64_t{0} - 99, 1}, {1, ~std::uint64_t{0}}})
    EXPECT_EQ(code_of(table_.begin_access(region_, id, offset, bytes, false)), ErrorCode::kRefused);
  EXPECT_EQ(code_of(table_.begin_access(region_, GrantId{99}, 0, 1, false)), ErrorCode::kRefused);
  EXPECT_EQ(code_of(table_.begin_access(RegionId{99}, GrantId{}, 0, 1, false)), ErrorCode::kRefused);
  EXPECT_EQ(code_of(table_.begin_access(add_region(), id, 0, 1, false)), ErrorCode::kRefused)
      << "a grant of another region";
  EXPECT_EQ(code_of(table_.remove_region(region_)), ErrorCode::kOk) << "a refusal left an access open";
}

TEST_F(TransferTableTest, NobodyGetsInByAMillionForgedReplayedExpiredOrForeignGrants) {
  constexpr std::uint64_t kTries = 1'000'000;
  const GrantId good = grant(100, 50);
  const GrantId revoked = grant(100, 50);
  EXPECT_EQ(code_of(table_.remove_grant(revoked)), ErrorCode::kOk);
  const GrantId expired = table_.add_grant(region_, 100, 50, {.lasts_ns = 1}, "").value();
  const GrantId to_read = table_.add_grant(region_, 100, 50, {.writes = false}, "").value();
  const RegionId other = add_region();
  const GrantId of_other = table_.add_grant(other, 100, 50, {}, "").value();
  clock_.advance(1);
  const GrantId of_member = table_.add_grant(region_, 100, 50, {.member = "owner"}, "").value();
  SecretNumbers without_a_secret{{}};
  std::mt19937_64 random(1);
  std::uint64_t num_accepted = 0;
  for (std::uint64_t count = 1; count <= kTries; ++count) {
    const std::uint64_t forged[] = {count,          good.value + count,      good.value - count,
                                    random(),       without_a_secret.draw(), good.value ^ 1ULL << count % 64,
                                    revoked.value,  expired.value,           to_read.value,
                                    of_other.value, of_member.value};
    num_accepted +=
        table_.begin_access(region_, GrantId{forged[count % std::size(forged)]}, 0, 1, true, "thief") ? 1 : 0;
  }
  EXPECT_EQ(num_accepted, 0U);
  EXPECT_EQ(table_.num_refused(), kTries);
  EXPECT_EQ(code_of(table_.begin_access(region_, good, 0, 50, true)), ErrorCode::kOk);
  table_.end_access(region_, good);
  EXPECT_EQ(code_of(table_.remove_region(region_)), ErrorCode::kOk) << "a refusal left an access open";
}

TEST_F(TransferTableTest, AGrantExpiresAtItsTimeAndACopyThatHasBegunEnds) {
  const GrantId id = table_.add_grant(region_, 100, 50, {.lasts_ns = kSecond}, "").value();
  clock_.advance(kSecond - 1);
  EXPECT_EQ(code_of(table_.begin_access(region_, id, 0, 1, true)), ErrorCode::kOk);
  clock_.advance(1);
  EXPECT_EQ(code_of(table_.begin_access(region_, id, 0, 1, true)), ErrorCode::kRefused);
  EXPECT_EQ(code_of(table_.remove_grant(id)), ErrorCode::kFull);
  table_.end_access(region_, id);
  EXPECT_EQ(code_of(table_.remove_grant(id)), ErrorCode::kOk);
}

TEST_F(TransferTableTest, AGrantWithoutARightOrWithATimeInThePastIsNotGiven) {
  EXPECT_EQ(code_of(table_.add_grant(region_, 0, 1, {.reads = false, .writes = false}, "")),
            ErrorCode::kInvalidArgument);
  EXPECT_EQ(code_of(table_.add_grant(region_, 0, 1, {.lasts_ns = -1}, "")), ErrorCode::kInvalidArgument);
  EXPECT_EQ(table_.expires_at({.lasts_ns = std::numeric_limits<TimeNs>::max()}), 0) << "after the end of all time";
}

TEST_F(TransferTableTest, TheIdsOfGrantsDependOnTheSecret) {
  TransferTable same(8, SecretNumbers("secret"), clock_), others(8, SecretNumbers("another"), clock_);
  std::vector<GrantId> ids;
  for (TransferTable* table : {&table_, &same, &others}) {
    const RegionId id = table->new_region_id();
    table->add_region(id, MemoryRegion{memory_.data(), kBytes}, encode(RegionDescriptor{}));
    ids.push_back(table->add_grant(id, 0, 1, {}, "").value());
  }
  EXPECT_EQ(ids[0], ids[1]);
  EXPECT_NE(ids[0], ids[2]);
}

TEST_F(TransferTableTest, AGrantThatIsTakenBackInMidCopyTakesNoNewOnesAndEndsWithTheLast) {
  const GrantId id = grant(100, 50);
  EXPECT_EQ(table_.begin_access(region_, id, 10, 40, false).value(), memory_.data() + 110);
  EXPECT_EQ(code_of(table_.remove_grant(id)), ErrorCode::kFull);
  EXPECT_EQ(code_of(table_.begin_access(region_, id, 0, 1, false)), ErrorCode::kRefused);
  EXPECT_EQ(code_of(table_.exported(id)), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code_of(table_.remove_region(region_)), ErrorCode::kFull);
  table_.end_access(region_, id);
  EXPECT_EQ(code_of(table_.remove_grant(id)), ErrorCode::kOk);
  EXPECT_EQ(code_of(table_.remove_grant(id)), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code_of(table_.remove_region(region_)), ErrorCode::kOk);
}

TEST_F(TransferTableTest, ARegionTakesItsGrantsAlongAndNoOthers) {
  const GrantId id = grant(100, 50);
  const GrantId other = table_.add_grant(add_region(), 0, 1, {}, "").value();
  EXPECT_EQ(code_of(table_.remove_region(region_)), ErrorCode::kOk);
  EXPECT_EQ(code_of(table_.remove_grant(id)), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code_of(table_.exported(id)), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code_of(table_.exported(other)), ErrorCode::kOk);
}

TEST_F(TransferTableTest, ATransferByAGrantIsCheckedAgainstTheGrant) {
  PagedTransfer by_grant = transfer();
  by_grant.remote_region = table_.exported(grant(100, 15)).value();
  EXPECT_EQ(code_of(table_.accept(by_grant)), ErrorCode::kInvalidArgument);
  by_grant.ranges = {{0, 5, 10}};
  EXPECT_EQ(table_.accept(by_grant).value().remote.base, 4096U + 100);
}

TEST_F(TransferTableTest, ChecksumsKeepTheRangesAsTheyWereGiven) {
  PagedTransfer checked = transfer();
  checked.ranges.push_back({30, 40, 0});
  EXPECT_EQ(table_.accept(checked).value().copies.size(), 1U) << "joined, and nothing of the empty one";
  checked.checksums = {1, 2, 3};
  const AcceptedTransfer accepted = table_.accept(checked).value();
  EXPECT_EQ(accepted.copies.size(), 3U);
  EXPECT_THAT(accepted.checksums, ElementsAre(1, 2, 3));
}

TEST_F(TransferTableTest, FeedingEndsWithTheLast) {
  PagedTransfer fed = transfer();
  fed.is_fed = true;
  const AcceptedTransfer accepted = table_.accept(fed).value();
  EXPECT_FALSE(accepted.is_complete);
  const FedCopies more = table_.feed(accepted.id, {{20, 20, 5}, {25, 25, 5}}, {}, false).value();
  ASSERT_EQ(more.copies.size(), 1U) << "joined";
  EXPECT_EQ(more.copies[0].bytes, 10U);
  EXPECT_FALSE(more.is_last);
  EXPECT_EQ(code_of(table_.feed(accepted.id, {{kBytes, 0, 1}}, {}, true)), ErrorCode::kInvalidArgument);
  EXPECT_TRUE(table_.feed(accepted.id, {}, {}, true).value().is_last) << "a bad feed is as if it had never been";
  EXPECT_EQ(code_of(table_.feed(accepted.id, {}, {}, true)), ErrorCode::kInvalidArgument);
  const TransferId whole = table_.accept(transfer()).value().id;
  EXPECT_EQ(code_of(table_.feed(whole, {}, {}, true)), ErrorCode::kInvalidArgument);
}

TEST_F(TransferTableTest, ChecksumsAreFedForAllRangesOrForNone) {
  PagedTransfer fed = transfer();
  fed.is_fed = true;
  const TransferId without = table_.accept(fed).value().id;
  EXPECT_EQ(code_of(table_.feed(without, {{0, 0, 1}}, {1}, false)), ErrorCode::kInvalidArgument);
  fed.checksums = {1, 2};
  const TransferId with = table_.accept(fed).value().id;
  EXPECT_EQ(code_of(table_.feed(with, {{0, 0, 1}}, {}, false)), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code_of(table_.feed(with, {{0, 0, 1}}, {1, 2}, false)), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code_of(table_.feed(with, {}, {}, false)), ErrorCode::kOk) << "none of none";
  EXPECT_THAT(table_.feed(with, {{0, 0, 1}, {1, 1, 1}}, {1, 2}, false).value().copies.size(), 2);
  fed.ranges.clear();
  fed.checksums.clear();
  const TransferId undecided = table_.accept(fed).value().id;
  EXPECT_EQ(code_of(table_.feed(undecided, {{0, 0, 1}}, {1}, false)), ErrorCode::kOk) << "the first range decides";
  EXPECT_EQ(code_of(table_.feed(undecided, {{0, 0, 1}}, {}, false)), ErrorCode::kInvalidArgument);
}

TEST_F(TransferTableTest, ACompletionNamesCorruptRangesAndFreesTheRegion) {
  const TransferId id = table_.accept(transfer()).value().id;
  EXPECT_EQ(code_of(table_.remove_region(region_)), ErrorCode::kFull);
  table_.complete(id, ErrorCode::kCorrupt, "differs", {0, 1});
  EXPECT_THAT(table_.completion_queue().take_completions(),
              ElementsAre(Completion{id, ErrorCode::kCorrupt, "differs", {0, 1}}));
  EXPECT_EQ(code_of(table_.feed(id, {}, {}, true)), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code_of(table_.remove_region(region_)), ErrorCode::kOk);
  EXPECT_THAT(table_.completion_queue().take_completions(), IsEmpty());
}

}  // namespace
}  // namespace kvferry
