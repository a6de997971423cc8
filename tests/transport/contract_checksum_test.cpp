// Tests checksums: right checksums pass; each wrong checksum is named, and then there is no notification.
#include "tests/transport/contract.h"

namespace kvferry {
namespace {

using ::testing::ElementsAre;

template <class Backend>
class TransportChecksums : public TransportContract<Backend> {
 protected:
  void SetUp() override {
    TransportContract<Backend>::SetUp();
    remote_ = this->fixture_.make_remote(kBytes);
    peer_ = this->connect_and_pull(*remote_);
    fill(remote_->memory(), 61);
    fill(this->memory_, 62);
  }
  /// Returns a transfer with ranges of many shapes: empty ranges, neighbours that could be joined, and a range that is
  /// longer than any piece that a backend moves at once.
  PagedTransfer transfer_with_checksums(Direction direction) {
    PagedTransfer transfer = this->pull(*remote_, peer_, random_ranges(63, 200, 3000));
    const std::uint64_t end = std::uint64_t{1} << 20;  // an offset after all ranges
    for (std::uint64_t index = 0; index < 20; ++index)
      transfer.ranges.push_back({end + index * 64, end + index * 64, 64});
    transfer.ranges.push_back({end + 20 * 64, end + 20 * 64, 0});
    transfer.ranges.push_back({end + 20 * 64, end + 20 * 64, kBytes - end - 20 * 64});
    transfer.direction = direction;
    transfer.checksums = this->checksums_of(transfer, *remote_);
    transfer.notification = "checked";
    return transfer;
  }
  void expect_corrupt(TransferId id, const std::vector<std::uint32_t>& ranges) {
    const std::vector<Completion> completions = wait_completions(*this->transport_, 1);
    ASSERT_EQ(completions.size(), 1U);
    EXPECT_EQ(completions[0].id, id);
    EXPECT_EQ(completions[0].code, ErrorCode::kCorrupt) << completions[0].what;
    EXPECT_FALSE(completions[0].what.empty());
    EXPECT_EQ(completions[0].corrupt_ranges, ranges);
    this->expect_only_note(*remote_, peer_, "after the corrupt one");
  }
  void flip(const PagedTransfer& transfer, std::size_t index, std::uint64_t at) {
    const CopyRange& range = transfer.ranges[index];
    std::byte& byte = transfer.direction == Direction::kPull ? remote_->memory()[range.remote_offset + at]
                                                             : this->memory_[range.local_offset + at];
    byte ^= std::byte{1};
  }
  std::unique_ptr<Remote> remote_;
  PeerId peer_;
};
TYPED_TEST_SUITE(TransportChecksums, Fixtures, FixtureNames);

TYPED_TEST(TransportChecksums, RightOnesPass) {
  for (const Direction direction : {Direction::kPull, Direction::kPush}) {
    const PagedTransfer transfer = this->transfer_with_checksums(direction);
    const std::vector<std::byte> expected = this->expected_after(transfer, *this->remote_);
    const TransferId id = this->transport_->submit(transfer).value();
    EXPECT_EQ(this->remote_->wait_notifications(1).size(), 1U);
    this->expect_one(id, ErrorCode::kOk);
    const std::span<const std::byte> got = direction == Direction::kPull ? this->memory_ : this->remote_->memory();
    EXPECT_TRUE(std::equal(expected.begin(), expected.end(), got.begin()));
    fill(this->remote_->memory(), 64);
  }
  this->expect_nothing_more();
}

TYPED_TEST(TransportChecksums, ChangedBytesAreNamedExactlyAndNothingIsAnnounced) {
  for (const Direction direction : {Direction::kPull, Direction::kPush}) {
    PagedTransfer transfer = this->transfer_with_checksums(direction);
    const auto last = static_cast<std::uint32_t>(transfer.ranges.size() - 1);
    transfer.checksums[5] ^= 1;
    this->flip(transfer, 203, 0);                                 // a range in the middle of its neighbours
    this->flip(transfer, last, transfer.ranges[last].bytes - 1);  // the last byte of a range of many pieces
    transfer.checksums[last - 1] ^= 1;                            // the checksum of the empty range
    this->expect_corrupt(this->transport_->submit(transfer).value(), {5, 203, last - 1, last});
  }
  this->expect_nothing_more();
}

TYPED_TEST(TransportChecksums, AFedTransferCountsItsRangesThroughAllLayers) {
  for (const Direction direction : {Direction::kPull, Direction::kPush}) {
    PagedTransfer transfer = this->transfer_with_checksums(direction);
    const std::vector<CopyRange> ranges = transfer.ranges;
    const std::vector<std::uint64_t> checksums = transfer.checksums;
    this->flip(transfer, 3, 0);
    this->flip(transfer, 210, 63);
    transfer.is_fed = true;
    transfer.ranges.resize(100);
    transfer.checksums.resize(100);
    const TransferId id = this->transport_->submit(transfer).value();
    EXPECT_EQ(code_of(this->transport_->feed(id, {{0, 0, 1}}, {}, false)), ErrorCode::kInvalidArgument)
        << "begun with checksums";
    EXPECT_TRUE(this->transport_->feed(id, {ranges.begin() + 100, ranges.begin() + 205},
                                       {checksums.begin() + 100, checksums.begin() + 205}, false));
    EXPECT_TRUE(this->transport_->feed(id, {ranges.begin() + 205, ranges.end()},
                                       {checksums.begin() + 205, checksums.end()}, true));
    this->expect_corrupt(id, {3, 210});
  }
  this->expect_nothing_more();
}

TYPED_TEST(TransportChecksums, OneForEachRangeOrNone) {
  PagedTransfer transfer = this->pull(*this->remote_, this->peer_, {{0, 0, 10}, {10, 10, 10}});
  transfer.checksums = {1};
  EXPECT_EQ(this->transport_->submit(transfer).error().code, ErrorCode::kInvalidArgument);
  transfer.checksums = {1, 2, 3};
  EXPECT_EQ(this->transport_->submit(transfer).error().code, ErrorCode::kInvalidArgument);
  this->expect_nothing_more();
}

}  // namespace
}  // namespace kvferry
