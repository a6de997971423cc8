// Tests transfers that are fed while they run, and the order of transfers that wait for the same peer.
#include "tests/transport/contract.h"

namespace kvferry {
namespace {

using ::testing::IsEmpty;

template <class Backend>
class TransportFeeding : public TransportContract<Backend> {
 protected:
  /// Submits a transfer without ranges. The test feeds them later.
  TransferId submit_fed(PagedTransfer transfer) {
    transfer.is_fed = true;
    return this->transport_->submit(std::move(transfer)).value();
  }
  ErrorCode feed(TransferId id, std::vector<CopyRange> ranges, bool is_last,
                 std::vector<std::uint64_t> checksums = {}) {
    return code_of(this->transport_->feed(id, std::move(ranges), std::move(checksums), is_last));
  }
  std::vector<CopyRange> layer_of(const std::vector<CopyRange>& ranges, std::size_t layer, std::size_t num_layers) {
    const auto at = [&](std::size_t index) {
      return ranges.begin() + static_cast<std::ptrdiff_t>(index * ranges.size() / num_layers);
    };
    return {at(layer), at(layer + 1)};
  }
};
TYPED_TEST_SUITE(TransportFeeding, Fixtures, FixtureNames);

TYPED_TEST(TransportFeeding, LayerByLayerWithOneNotificationAfterTheLast) {
  const auto remote = this->fixture_.make_remote(kBytes);
  const PeerId peer = this->connect_and_pull(*remote);
  constexpr std::size_t kLayers = 6;
  std::uint64_t seed = 40;
  for (const Direction direction : {Direction::kPull, Direction::kPush}) {
    PagedTransfer transfer = this->pull(*remote, peer, random_ranges(++seed, 900, 4000));
    transfer.direction = direction;
    transfer.notification = "all layers";
    fill(remote->memory(), seed);
    fill(this->memory_, seed + 1000);
    const std::vector<std::byte> expected = this->expected_after(transfer, *remote);
    const std::vector<CopyRange> ranges = std::exchange(transfer.ranges, {});
    transfer.ranges = this->layer_of(ranges, 0, kLayers);
    const TransferId id = this->submit_fed(transfer);
    for (std::size_t layer = 1; layer < kLayers; ++layer) {
      // Nothing but the transfer that sends this notification completes.
      this->expect_only_note(*remote, peer, "not yet");
      EXPECT_EQ(this->feed(id, this->layer_of(ranges, layer, kLayers), layer + 1 == kLayers), ErrorCode::kOk);
    }
    const std::vector<Notification> notes = remote->wait_notifications(1);
    ASSERT_EQ(notes.size(), 1U);
    EXPECT_EQ(notes[0].body, "all layers");
    this->expect_one(id, ErrorCode::kOk);
    const std::span<const std::byte> got = direction == Direction::kPull ? this->memory_ : remote->memory();
    EXPECT_TRUE(std::equal(expected.begin(), expected.end(), got.begin()));
  }
  this->expect_nothing_more();
}

TYPED_TEST(TransportFeeding, TheLastLayerMayBeEmptyAndSoMayAll) {
  const auto remote = this->fixture_.make_remote(kBytes);
  const PeerId peer = this->connect_and_pull(*remote);
  for (const std::vector<CopyRange>& first : {std::vector<CopyRange>{}, std::vector<CopyRange>{{0, 0, 100}}}) {
    PagedTransfer transfer = this->pull(*remote, peer, first);
    transfer.notification = "done";
    const TransferId id = this->submit_fed(transfer);
    EXPECT_EQ(this->feed(id, {}, false), ErrorCode::kOk);
    EXPECT_EQ(this->feed(id, {}, true), ErrorCode::kOk);
    this->expect_one(id, ErrorCode::kOk);
    EXPECT_EQ(remote->wait_notifications(1).size(), 1U);
  }
  this->expect_nothing_more();
}

TYPED_TEST(TransportFeeding, BadFeedsAreRefusedAndTheTransferGoesOn) {
  const auto remote = this->fixture_.make_remote(kBytes);
  const PeerId peer = this->connect_and_pull(*remote);
  fill(remote->memory(), 50);
  const TransferId id = this->submit_fed(this->pull(*remote, peer, {{0, 0, 100}}));
  constexpr std::uint64_t kHuge = ~std::uint64_t{0};
  for (const CopyRange& range :
       std::vector<CopyRange>{{kBytes - 1, 0, 2}, {0, kBytes - 1, 2}, {0, 0, kHuge}, {kHuge, 0, 2}, {2, kHuge, 0}})
    EXPECT_EQ(this->feed(id, {{100, 100, 100}, range}, true), ErrorCode::kInvalidArgument);
  EXPECT_EQ(this->feed(id, {{100, 100, 100}}, true, {1, 2}), ErrorCode::kInvalidArgument) << "two sums, one range";
  EXPECT_EQ(this->feed(id, {{100, 100, 100}}, true, {1}), ErrorCode::kInvalidArgument) << "begun without checksums";
  EXPECT_EQ(this->feed(TransferId{id.value + 1}, {}, true), ErrorCode::kInvalidArgument);
  EXPECT_EQ(this->feed(id, {{200, 200, 100}}, true), ErrorCode::kOk);
  EXPECT_EQ(this->feed(id, {}, true), ErrorCode::kInvalidArgument) << "the last was fed";
  this->expect_one(id, ErrorCode::kOk);
  EXPECT_EQ(this->feed(id, {}, true), ErrorCode::kInvalidArgument) << "it is over";
  std::vector<std::byte> expected(300);
  std::copy_n(remote->memory().begin(), 100, expected.begin());
  std::copy_n(remote->memory().begin() + 200, 100, expected.begin() + 200);
  std::copy_n(this->memory_.begin() + 100, 100, expected.begin() + 100);  // bytes that were not requested
  EXPECT_TRUE(std::equal(expected.begin(), expected.end(), this->memory_.begin()));

  const TransferId whole = this->transport_->submit(this->pull(*remote, peer)).value();
  EXPECT_EQ(this->feed(whole, {}, true), ErrorCode::kInvalidArgument) << "it was not begun to be fed";
  this->expect_one(whole, ErrorCode::kOk);
  this->expect_nothing_more();
}

TYPED_TEST(TransportFeeding, CancelEndsATransferThatWaitsToBeFed) {
  const auto remote = this->fixture_.make_remote(kBytes);
  const PeerId peer = this->connect_and_pull(*remote);
  PagedTransfer transfer = this->pull(*remote, peer);
  transfer.notification = "never";
  const TransferId id = this->submit_fed(transfer);
  EXPECT_EQ(code_of(this->transport_->unregister_region(this->region_)), ErrorCode::kFull) << "it is still open";
  this->transport_->cancel(id);
  this->expect_one(id, ErrorCode::kCancelled);
  EXPECT_EQ(this->feed(id, {{0, 0, 10}}, true), ErrorCode::kInvalidArgument);
  this->expect_only_note(*remote, peer, "still alive");
  this->expect_nothing_more();
}

TYPED_TEST(TransportFeeding, FeedsThatRaceWithACancelNeverCompleteTwice) {
  const auto remote = this->fixture_.make_remote(kBytes);
  const PeerId peer = this->connect_and_pull(*remote);
  for (int round = 0; round < 30; ++round) {
    const TransferId id = this->submit_fed(this->pull(*remote, peer));
    std::thread canceller([&] { this->transport_->cancel(id); });
    for (std::uint64_t layer = 1; layer < 10; ++layer) this->feed(id, {{layer * 4096, layer * 4096, 4000}}, layer == 9);
    canceller.join();
    const std::vector<Completion> completions = wait_completions(*this->transport_, 1);
    ASSERT_EQ(completions.size(), 1U);
    EXPECT_EQ(completions[0].id, id);
    EXPECT_TRUE(completions[0].code == ErrorCode::kOk || completions[0].code == ErrorCode::kCancelled);
  }
  this->expect_nothing_more();
}

TYPED_TEST(TransportFeeding, AKilledPeerEndsATransferThatWaitsToBeFed) {
  const auto remote = this->fixture_.make_remote(kBytes);
  const PeerId peer = this->connect_and_pull(*remote);
  const TransferId id = this->submit_fed(this->pull(*remote, peer));
  remote->kill();
  this->expect_one(id, ErrorCode::kPeerLost);
  EXPECT_EQ(this->feed(id, {{0, 0, 10}}, true), ErrorCode::kInvalidArgument);
  this->expect_nothing_more();
}

TYPED_TEST(TransportFeeding, DisconnectEndsATransferThatWaitsToBeFed) {
  const auto remote = this->fixture_.make_remote(kBytes);
  const PeerId peer = this->connect_and_pull(*remote);
  const TransferId id = this->submit_fed(this->pull(*remote, peer));
  this->transport_->disconnect(peer);
  this->expect_one(id, ErrorCode::kPeerLost);
  this->expect_nothing_more();
}

/// Number of background transfers: so few that the backend posts all of them when it next reads its queue, but far more
/// than any backend runs with one peer at a time.
constexpr std::size_t kBackground = 48;
// Limit on the background transfers that have begun before an urgent one: a backend runs four at a time, and its thread
// may begin four more before it reads the queue.
constexpr std::size_t kUnderWayMax = 8;
constexpr int kAttempts = 20;
constexpr int kCountedMin = 3;  // number of attempts that must count

TYPED_TEST(TransportFeeding, AnUrgentTransferGoesBeforeBackgroundOnesThatWait) {
  const auto remote = this->fixture_.make_remote(kBytes);
  const PeerId peer = this->connect_and_pull(*remote);
  PagedTransfer background = this->pull(*remote, peer, {{0, 0, kBytes}});
  background.priority = Priority::kBackground;
  PagedTransfer urgent = this->pull(*remote, peer, {{0, 0, 100}});
  urgent.priority = Priority::kUrgent;
  // If transfers do not need the remote, nothing delays the background transfers, and this thread may be slower than
  // they are. Then too few of them wait, and the attempt shows nothing, so it is repeated. But every attempt must keep
  // the promise.
  bool is_shown = false;
  for (int attempt = 0; attempt < kAttempts && !is_shown; ++attempt) {
    remote->stop();
    for (std::size_t index = 0; index < kBackground; ++index) ASSERT_TRUE(this->transport_->submit(background));
    const TransferId id = this->transport_->submit(urgent).value();
    std::vector<Completion> completions = this->transport_->poll();
    const std::size_t num_too_early = completions.size();
    remote->go_on();
    for (Completion& later : wait_completions(*this->transport_, kBackground + 1 - num_too_early))
      completions.push_back(std::move(later));
    ASSERT_EQ(completions.size(), kBackground + 1);
    const auto is_urgent = [&](const Completion& completion) { return completion.id == id; };
    const auto at = std::find_if(completions.begin(), completions.end(), is_urgent);
    ASSERT_NE(at, completions.end());
    const auto num_before = static_cast<std::size_t>(at - completions.begin());
    EXPECT_LE(num_before, num_too_early + kUnderWayMax) << "attempt " << attempt;
    is_shown = num_too_early + kUnderWayMax < kBackground / 2;
    for (const Completion& completion : completions) EXPECT_EQ(completion.code, ErrorCode::kOk) << completion.what;
  }
  EXPECT_TRUE(is_shown) << "half of the background was done before the urgent one was submitted, each time";
  this->expect_nothing_more();
}

TYPED_TEST(TransportFeeding, AnUrgentTransferGoesBeforeTheRestOfARunningOne) {
  const auto remote = this->fixture_.make_remote(kBytes);
  const PeerId peer = this->connect_and_pull(*remote);
  const std::vector<CopyRange> half(kBackground / 2, {0, 0, kBytes});
  PagedTransfer background = this->pull(*remote, peer, half);
  background.priority = Priority::kBackground;
  PagedTransfer urgent = this->pull(*remote, peer, {{0, 0, 100}});
  urgent.priority = Priority::kUrgent;
  // The second half of the background transfer is fed after the urgent transfer was submitted, so the background
  // transfer must never end first. An attempt counts only if the urgent transfer still ran at that time, because only
  // then the backend could choose.
  int num_counted = 0;
  for (int attempt = 0; attempt < kAttempts && num_counted < kCountedMin; ++attempt) {
    remote->stop();
    const TransferId first = this->submit_fed(background);
    wait_until_posted(*this->transport_);
    const TransferId id = this->transport_->submit(urgent).value();
    EXPECT_EQ(this->feed(first, half, true), ErrorCode::kOk);
    std::vector<Completion> completions = this->transport_->poll();
    num_counted += completions.empty() ? 1 : 0;
    remote->go_on();
    for (Completion& later : wait_completions(*this->transport_, 2 - completions.size()))
      completions.push_back(std::move(later));
    ASSERT_EQ(completions.size(), 2U);
    EXPECT_EQ(completions[0].id, id) << "attempt " << attempt;
    EXPECT_EQ(completions[1].id, first) << "attempt " << attempt;
    for (const Completion& completion : completions) EXPECT_EQ(completion.code, ErrorCode::kOk) << completion.what;
  }
  EXPECT_EQ(num_counted, kCountedMin) << "the urgent one was done before the rest was fed, in the other attempts";
  this->expect_nothing_more();
}

TYPED_TEST(TransportFeeding, AnUrgentTransferThatWaitsToBeFedHoldsNobodyUp) {
  const auto remote = this->fixture_.make_remote(kBytes);
  const PeerId peer = this->connect_and_pull(*remote);
  PagedTransfer urgent = this->pull(*remote, peer);
  urgent.priority = Priority::kUrgent;
  const TransferId fed = this->submit_fed(urgent);
  PagedTransfer background = this->pull(*remote, peer, {{8192, 8192, 100'000}});
  background.priority = Priority::kBackground;
  const TransferId id = this->transport_->submit(background).value();
  this->expect_one(id, ErrorCode::kOk);
  EXPECT_EQ(this->feed(fed, {}, true), ErrorCode::kOk);
  this->expect_one(fed, ErrorCode::kOk);
}

}  // namespace
}  // namespace kvferry
