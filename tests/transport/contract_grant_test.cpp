// Tests grants: parts of a region that peers may access until the grant is revoked.
#include "tests/transport/contract.h"
#include "transport/transfer_table.h"

namespace kvferry {
namespace {

constexpr std::uint64_t kOffset = 10'000;
constexpr std::uint64_t kGrantedBytes = 50'000;

template <class Backend>
class TransportGrants : public TransportContract<Backend> {
 protected:
  void SetUp() override {
    TransportContract<Backend>::SetUp();
    if (!this->fixture_.has_grants()) {
      EXPECT_EQ(this->transport_->grant(this->region_, 0, 1).error().code, ErrorCode::kUnavailable);
      GTEST_SKIP() << "it grants none";
    }
    remote_ = this->fixture_.make_remote(kBytes);
    peer_ = this->connect_and_pull(*remote_);
    fill(remote_->memory(), 71);
    fill(this->memory_, 72);
  }
  PagedTransfer by(const RemoteGrant& granted, Direction direction, std::vector<CopyRange> ranges) {
    return {peer_, direction, this->region_, granted.exported, std::move(ranges), "by a grant"};
  }
  void take_back(GrantId grant) {
    ErrorCode code = remote_->revoke(grant);
    // repeats; the time limit of the test ends this loop
    while (code == ErrorCode::kFull) code = remote_->revoke(grant);
    EXPECT_EQ(code, ErrorCode::kOk);
  }
  /// Expects that transfers with the revoked descriptor move nothing.
  void expect_refused(const RemoteGrant& granted) {
    for (const Direction direction : {Direction::kPull, Direction::kPush}) {
      const std::vector<std::byte> here = this->memory_;
      const std::vector<std::byte> there(remote_->memory().begin(), remote_->memory().end());
      const TransferId id = this->transport_->submit(by(granted, direction, {{7, 0, 100}, {500, 300, 20'000}})).value();
      this->expect_one(id, ErrorCode::kRefused);
      this->expect_only_note(*remote_, peer_, "after the refused one");
      EXPECT_TRUE(here == this->memory_);
      EXPECT_TRUE(std::equal(there.begin(), there.end(), remote_->memory().begin()));
    }
  }
  std::unique_ptr<Remote> remote_;
  PeerId peer_;
};
TYPED_TEST_SUITE(TransportGrants, Fixtures, FixtureNames);

TYPED_TEST(TransportGrants, OffsetsCountFromTheStartOfTheGrant) {
  const RemoteGrant granted = this->remote_->grant(kOffset, kGrantedBytes);
  const std::vector<CopyRange> ranges = {{1, 0, 100}, {5000, kGrantedBytes - 300, 300}, {200, 1000, 4000}};
  std::vector<CopyRange> absolute = ranges;
  for (CopyRange& range : absolute) range.remote_offset += kOffset;
  for (const Direction direction : {Direction::kPull, Direction::kPush}) {
    PagedTransfer same = this->pull(*this->remote_, this->peer_, absolute);
    same.direction = direction;
    const std::vector<std::byte> expected = this->expected_after(same, *this->remote_);
    const TransferId id = this->transport_->submit(this->by(granted, direction, ranges)).value();
    EXPECT_EQ(this->remote_->wait_notifications(1).size(), 1U);
    this->expect_one(id, ErrorCode::kOk);
    const std::span<const std::byte> got = direction == Direction::kPull ? this->memory_ : this->remote_->memory();
    EXPECT_TRUE(std::equal(expected.begin(), expected.end(), got.begin()));
    fill(this->memory_, 73);
  }
  this->expect_nothing_more();
}

TYPED_TEST(TransportGrants, NothingBeyondItsEndIsAccepted) {
  const RemoteGrant granted = this->remote_->grant(kOffset, kGrantedBytes);
  for (const CopyRange& range : std::vector<CopyRange>{{0, kGrantedBytes, 1},
                                                       {0, kGrantedBytes - 1, 2},
                                                       {0, 0, kGrantedBytes + 1},
                                                       {0, ~std::uint64_t{0} - kOffset + 1, 1}}) {
    const Result<TransferId> refused = this->transport_->submit(this->by(granted, Direction::kPush, {range}));
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code, ErrorCode::kInvalidArgument);
  }
  PagedTransfer fed = this->by(granted, Direction::kPush, {});
  fed.is_fed = true;
  const TransferId id = this->transport_->submit(fed).value();
  EXPECT_EQ(code_of(this->transport_->feed(id, {{0, kGrantedBytes, 1}}, {}, true)), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code_of(this->transport_->feed(id, {{0, kGrantedBytes - 1, 1}}, {}, true)), ErrorCode::kOk);
  this->expect_one(id, ErrorCode::kOk);
  this->expect_nothing_more();
}

TYPED_TEST(TransportGrants, OneThatWasTakenBackIsRefused) {
  const RemoteGrant first = this->remote_->grant(kOffset, kGrantedBytes);
  const RemoteGrant second = this->remote_->grant(kOffset, kGrantedBytes);
  this->take_back(first.id);
  this->expect_refused(first);
  const TransferId id = this->transport_->submit(this->by(second, Direction::kPush, {{0, 0, 100}})).value();
  this->expect_one(id, ErrorCode::kOk);
  EXPECT_EQ(this->remote_->wait_notifications(1).size(), 1U);
  this->take_back(second.id);
  this->expect_refused(second);
  this->expect_nothing_more();
}

TYPED_TEST(TransportGrants, TheyDieWithTheirRegion) {
  const RemoteGrant granted = this->remote_->grant(kOffset, kGrantedBytes);
  EXPECT_EQ(this->remote_->unregister(), ErrorCode::kOk);
  EXPECT_EQ(this->remote_->revoke(granted.id), ErrorCode::kInvalidArgument);
  this->expect_refused(granted);
  if (this->fixture_.enforces_unregister()) this->expect_refused({GrantId{}, this->remote_->region()});
  this->expect_nothing_more();
}

TYPED_TEST(TransportGrants, AreTakenBackOnce) {
  Transport& transport = *this->transport_;
  const GrantId grant = transport.grant(this->region_, 0, 100).value();
  ASSERT_TRUE(transport.export_grant(grant));
  EXPECT_TRUE(transport.revoke(grant));
  EXPECT_EQ(code_of(transport.revoke(grant)), ErrorCode::kInvalidArgument);
  EXPECT_EQ(transport.export_grant(grant).error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(code_of(transport.revoke(GrantId{4711})), ErrorCode::kInvalidArgument);
  const GrantId with_region = transport.grant(this->region_, 0, 100).value();
  EXPECT_NE(with_region, grant) << "an id is used once";
  EXPECT_TRUE(transport.unregister_region(this->region_));
  EXPECT_EQ(transport.export_grant(with_region).error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(code_of(transport.revoke(with_region)), ErrorCode::kInvalidArgument);
}

TYPED_TEST(TransportGrants, BadOnesAreNotGiven) {
  Transport& transport = *this->transport_;
  const auto code_for = [&](RegionId region, std::uint64_t offset, std::uint64_t bytes) {
    return transport.grant(region, offset, bytes).error().code;
  };
  EXPECT_EQ(code_for(RegionId{4711}, 0, 1), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code_for(this->region_, 0, 0), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code_for(this->region_, 0, kBytes + 1), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code_for(this->region_, kBytes, 1), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code_for(this->region_, 2, ~std::uint64_t{0}), ErrorCode::kInvalidArgument);
}

TYPED_TEST(TransportGrants, TooManyAtATimeAreRefusedUntilOneComesBack) {
  Transport& transport = *this->transport_;
  const GrantId first = transport.grant(this->region_, 0, 1).value();
  for (std::size_t count = 1; count < TransferTable::kGrantsMax; ++count)
    ASSERT_TRUE(transport.grant(this->region_, 0, 1));
  EXPECT_EQ(transport.grant(this->region_, 0, 1).error().code, ErrorCode::kFull);
  EXPECT_TRUE(transport.revoke(first));
  EXPECT_TRUE(transport.grant(this->region_, 0, 1));
}

}  // namespace
}  // namespace kvferry
