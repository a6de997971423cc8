// Tests grants: parts of a region that peers may access until the grant is revoked.
#include <functional>
#include <random>

#include "tests/transport/contract.h"
#include "transport/planner/plan_address.h"
#include "transport/region_descriptor.h"
#include "transport/shm/messages.h"
#include "transport/transfer_table.h"

namespace kvferry {
namespace {

constexpr std::uint64_t kOffset = 10'000;
constexpr std::uint64_t kGrantedBytes = 50'000;

/// Changes the descriptor of a grant; of a planner's grant, that of each backend.
std::string forged(const std::string& exported, const std::function<void(RegionDescriptor&)>& change) {
  if (auto descriptor = decode<RegionDescriptor>(exported, "descriptor")) {
    change(*descriptor);
    return encode(*descriptor);
  }
  planner::RegionParts parts = decode<planner::RegionParts>(exported, "parts of a descriptor").value();
  for (planner::Part& part : parts.parts) part.bytes = forged(part.bytes, change);
  return encode(parts);
}

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
  /// Expects that transfers with a descriptor that gives no right move nothing.
  void expect_refused(const RemoteGrant& granted) {
    for (const Direction direction : {Direction::kPull, Direction::kPush}) expect_refused(granted, direction);
  }
  void expect_refused(const RemoteGrant& granted, Direction direction) {
    const std::vector<std::byte> here = this->memory_;
    const std::vector<std::byte> there(remote_->memory().begin(), remote_->memory().end());
    const TransferId id = this->transport_->submit(by(granted, direction, {{7, 0, 100}, {500, 300, 20'000}})).value();
    this->expect_one(id, ErrorCode::kRefused);
    this->expect_only_note(*remote_, peer_, "after the refused one");
    EXPECT_TRUE(here == this->memory_);
    EXPECT_TRUE(std::equal(there.begin(), there.end(), remote_->memory().begin()));
  }
  void expect_served(const RemoteGrant& granted, Direction direction) {
    this->expect_one(this->transport_->submit(by(granted, direction, {{7, 0, 100}})).value(), ErrorCode::kOk);
    EXPECT_EQ(remote_->wait_notifications(1).size(), 1U);
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

TYPED_TEST(TransportGrants, ForgedOnesAreRefused) {
  const RemoteGrant granted = this->remote_->grant(kOffset, kGrantedBytes);
  const RemoteGrant only_read = this->remote_->grant(0, 2 * kGrantedBytes, {.reads = true, .writes = false});
  this->expect_served(granted, Direction::kPush);
  const std::vector<std::byte> there(this->remote_->memory().begin(), this->remote_->memory().end());
  const std::uint64_t refused_before = this->remote_->num_refused();
  std::mt19937_64 random(7);
  constexpr std::uint64_t kForged = 1000;
  for (std::uint64_t count = 1; count <= kForged; ++count) {
    const RemoteGrant guess{{}, forged(granted.exported, [&](RegionDescriptor& one) {
                              const std::uint64_t guesses[] = {count, one.grant + count, one.grant - count,
                                                               one.grant ^ std::uint64_t{1} << count % 64, random()};
                              one.grant = guesses[count % std::size(guesses)];
                            })};
    const Direction direction = count % 2 == 0 ? Direction::kPull : Direction::kPush;
    const TransferId id = this->transport_->submit(this->by(guess, direction, {{7, 0, 100}})).value();
    this->expect_one(id, ErrorCode::kRefused);
  }
  // Where the initiating side copies, the owner sees requests to map its memory, and no copies.
  if (this->fixture_.needs_running_remote()) {
    EXPECT_EQ(this->remote_->num_refused() - refused_before, kForged);
  }
  // The descriptor of a grant with another range or region, and of one that only allows to read.
  const std::vector<std::function<void(RegionDescriptor&)>> changes = {
      [](RegionDescriptor& one) { one.region += 1; },
      [&](RegionDescriptor& one) { one.grant = only_read.id.value + 1; },
      [](RegionDescriptor& one) {
        one.base -= kOffset;
        one.bytes += 2 * kOffset;
      }};
  for (const auto& change : changes) {
    PagedTransfer beyond = this->by({{}, forged(granted.exported, change)}, Direction::kPush, {{7, kGrantedBytes, 1}});
    if (const Result<TransferId> id = this->transport_->submit(beyond)) this->expect_one(*id, ErrorCode::kRefused);
  }
  const RemoteGrant rights{{}, forged(only_read.exported, [](RegionDescriptor& one) {
                             if (auto key = decode<shm::RegionMemoryKey>(one.rkey, "shared memory's key")) {
                               key->writes = true;
                               one.rkey = encode(*key);
                             }
                           })};
  this->expect_one(this->transport_->submit(this->by(rights, Direction::kPush, {{7, 0, 100}})).value(),
                   ErrorCode::kRefused);
  EXPECT_TRUE(std::equal(there.begin(), there.end(), this->remote_->memory().begin()));
  this->expect_served(granted, Direction::kPush);
  this->expect_nothing_more();
}

TYPED_TEST(TransportGrants, TheyAllowOnlyTheDirectionsOfTheirTerms) {
  const RemoteGrant to_read = this->remote_->grant(kOffset, kGrantedBytes, {.reads = true, .writes = false});
  const RemoteGrant to_write = this->remote_->grant(kOffset, kGrantedBytes, {.reads = false, .writes = true});
  for (int repeat = 0; repeat < 2; ++repeat) {
    this->expect_refused(to_read, Direction::kPush);
    this->expect_refused(to_write, Direction::kPull);
    this->expect_served(to_read, Direction::kPull);
    this->expect_served(to_write, Direction::kPush);
  }
  this->expect_nothing_more();
}

TYPED_TEST(TransportGrants, ExpiredOnesAreRefused) {
  const RemoteGrant lasting = this->remote_->grant(kOffset, kGrantedBytes, {.lasts_ns = 3600 * kSecond});
  const RemoteGrant expired = this->remote_->grant(kOffset, kGrantedBytes, {.lasts_ns = 1});
  const RemoteGrant prolonged{{}, forged(expired.exported, [](RegionDescriptor& one) {
                                if (auto key = decode<shm::RegionMemoryKey>(one.rkey, "shared memory's key")) {
                                  key->expires_at = 0;
                                  one.rkey = encode(*key);
                                }
                              })};
  this->expect_refused(expired);
  this->expect_refused(prolonged);
  for (const Direction direction : {Direction::kPull, Direction::kPush}) this->expect_served(lasting, direction);
  this->expect_refused(expired);
  this->take_back(expired.id);
  this->expect_refused(expired);
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
