// Tests that bytes arrive in the right place, that notifications arrive after the bytes, and that wrong requests are
// refused.
#include <map>
#include <thread>

#include "tests/transport/contract.h"

namespace kvferry {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

template <class Backend>
class TransportTransfers : public TransportContract<Backend> {};
TYPED_TEST_SUITE(TransportTransfers, Fixtures, FixtureNames);

TYPED_TEST(TransportTransfers, PullCopiesExactlyTheNamedBytes) {
  const auto remote = this->fixture_.make_remote(kBytes);
  const PeerId peer = this->connect_and_pull(*remote);
  const struct {
    std::size_t num_ranges;
    std::uint64_t bytes_max;
  } shapes[] = {{0, 0}, {1, 1}, {1, kBytes - 2}, {5000, 17}, {700, 5000}, {3, 1'300'000}};
  std::uint64_t seed = 1;
  for (const auto& shape : shapes) {
    const std::vector<CopyRange> ranges = random_ranges(++seed, shape.num_ranges, shape.bytes_max);
    fill(remote->memory(), seed);
    fill(this->memory_, seed + 1000);
    const PagedTransfer transfer = this->pull(*remote, peer, ranges);
    const std::vector<std::byte> expected = this->expected_after(transfer, *remote);
    const TransferId id = this->transport_->submit(transfer).value();
    this->expect_one(id, ErrorCode::kOk);
    EXPECT_TRUE(this->memory_ == expected) << "seed " << seed << ", " << shape.num_ranges << " ranges";
  }
  this->expect_nothing_more();
}

TYPED_TEST(TransportTransfers, PushDeliversExactlyTheNamedBytesAndThenTheNotification) {
  const auto remote = this->fixture_.make_remote(kBytes);
  const PeerId peer = this->connect_and_pull(*remote);
  std::uint64_t seed = 100;
  for (const std::size_t num_ranges : {0, 1, 3000}) {
    const std::vector<CopyRange> ranges = random_ranges(++seed, num_ranges, num_ranges == 1 ? kBytes - 2 : 1000);
    fill(this->memory_, seed);
    fill(remote->memory(), seed + 1000);
    const PagedTransfer push{peer, Direction::kPush, this->region_, remote->region(), ranges, "pushed"};
    const std::vector<std::byte> expected = this->expected_after(push, *remote);
    const TransferId id = this->transport_->submit(push).value();
    const std::vector<Notification> notes = remote->wait_notifications(1);
    ASSERT_EQ(notes.size(), 1U);
    EXPECT_EQ(notes[0].body, "pushed");
    EXPECT_EQ(notes[0].from, this->transport_->address());
    EXPECT_TRUE(std::equal(expected.begin(), expected.end(), remote->memory().begin())) << "seed " << seed;
    this->expect_one(id, ErrorCode::kOk);
  }
  this->expect_nothing_more();
}

TYPED_TEST(TransportTransfers, APullNotifiesThePeerToo) {
  const auto remote = this->fixture_.make_remote(kBytes);
  PagedTransfer transfer = this->pull(*remote, this->transport_->connect(remote->address()).value());
  transfer.notification = std::string(60'000, 'x');
  const TransferId id = this->transport_->submit(transfer).value();
  const std::vector<Notification> notes = remote->wait_notifications(1);
  ASSERT_EQ(notes.size(), 1U);
  EXPECT_EQ(notes[0].body, transfer.notification);
  this->expect_one(id, ErrorCode::kOk);
}

TYPED_TEST(TransportTransfers, NotificationsComeFromTheSourceAddress) {
  this->transport_->set_source_address("another name");
  const auto remote = this->fixture_.make_remote(kBytes);
  const PeerId peer = this->transport_->connect(remote->address()).value();
  for (const Direction direction : {Direction::kPull, Direction::kPush}) {
    for (const std::uint64_t bytes : {std::uint64_t{0}, std::uint64_t{100}, kBytes}) {
      PagedTransfer transfer = this->pull(*remote, peer, {{0, 0, bytes}});
      transfer.direction = direction;
      transfer.notification = "who?";
      const TransferId id = this->transport_->submit(transfer).value();
      const std::vector<Notification> notes = remote->wait_notifications(1);
      ASSERT_EQ(notes.size(), 1U);
      EXPECT_EQ(notes[0].from, "another name");
      this->expect_one(id, ErrorCode::kOk);
    }
  }
}

TYPED_TEST(TransportTransfers, TwoTransportsPullFromEachOtherAndNotify) {
  const std::unique_ptr<Transport> other = this->fixture_.make_transport(1024);
  std::vector<std::byte> other_memory(kBytes);
  fill(other_memory, 7);
  const std::vector<std::byte> half(other_memory.begin(), other_memory.begin() + kBytes / 2);
  const RegionId other_region = other->register_region(other_memory.data(), kBytes).value();
  const std::string exported = other->export_region(other_region).value();
  const std::string own_exported = this->transport_->export_region(this->region_).value();
  const PeerId there = this->transport_->connect(other->address()).value();
  const PeerId back = other->connect(this->transport_->address()).value();
  ASSERT_TRUE(this->transport_->submit({there, Direction::kPull, this->region_, exported, {{0, 0, kBytes / 2}}, "a"}));
  ASSERT_TRUE(other->submit({back, Direction::kPush, other_region, own_exported, {{0, kBytes / 2, kBytes / 2}}, "b"}));
  const std::vector<Notification> to_other = wait_notifications(*other, 1);
  const std::vector<Notification> to_this = wait_notifications(*this->transport_, 1);
  ASSERT_EQ(to_other.size(), 1U);
  ASSERT_EQ(to_this.size(), 1U);
  EXPECT_EQ(to_other[0].from, this->transport_->address());
  EXPECT_EQ(to_this[0].from, other->address());
  EXPECT_EQ(wait_completions(*this->transport_, 1).at(0).code, ErrorCode::kOk);
  EXPECT_EQ(wait_completions(*other, 1).at(0).code, ErrorCode::kOk);
  EXPECT_TRUE(std::equal(half.begin(), half.end(), this->memory_.begin()));
  EXPECT_TRUE(std::equal(half.begin(), half.end(), this->memory_.begin() + kBytes / 2));
}

TYPED_TEST(TransportTransfers, BadTransfersAreRefusedAndNothingHappens) {
  const auto remote = this->fixture_.make_remote(kBytes);
  const PeerId peer = this->connect_and_pull(*remote);
  constexpr std::uint64_t kHuge = ~std::uint64_t{0};
  std::vector<PagedTransfer> bad;
  for (const CopyRange& range : std::vector<CopyRange>{{kBytes - 1, 0, 2},
                                                       {0, kBytes - 1, 2},
                                                       {kBytes + 1, 0, 0},
                                                       {0, kBytes + 1, 0},
                                                       {kHuge, 0, 2},
                                                       {0, kHuge, 2},
                                                       {0, 0, kHuge},
                                                       {2, 2, kHuge}})
    bad.push_back(this->pull(*remote, peer, {{0, 0, 8}, range}));
  for (int kind = 0; kind < 5; ++kind) bad.push_back(this->pull(*remote, peer));
  bad[8].peer = PeerId{peer.value + 1};
  bad[9].local = RegionId{this->region_.value + 1};
  bad[10].remote_region = "garbage";
  // this region belongs to this transport and not to the peer
  bad[11].remote_region = this->transport_->export_region(this->region_).value();
  bad[12].notification = std::string(65'537, 'x');
  const std::vector<std::byte> before = this->memory_;
  for (std::size_t index = 0; index < bad.size(); ++index) {
    const Result<TransferId> refused = this->transport_->submit(bad[index]);
    ASSERT_FALSE(refused) << "transfer " << index;
    EXPECT_EQ(refused.error().code, ErrorCode::kInvalidArgument) << refused.error().str();
  }
  EXPECT_FALSE(this->transport_->register_region(nullptr, 1));
  EXPECT_FALSE(this->transport_->register_region(this->memory_.data(), 0));
  EXPECT_EQ(this->transport_->export_region(RegionId{99}).error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(this->transport_->unregister_region(RegionId{99}).error().code, ErrorCode::kInvalidArgument);
  for (const std::string& address : {std::string("nobody"), remote->address().substr(0, 8)})
    EXPECT_EQ(this->transport_->connect(address).error().code, ErrorCode::kInvalidArgument);
  this->expect_nothing_more();
  EXPECT_TRUE(this->memory_ == before);
}

TYPED_TEST(TransportTransfers, ConnectingTwiceGivesOnePeerUntilItIsDisconnected) {
  const auto remote = this->fixture_.make_remote(kBytes);
  const PeerId peer = this->connect_and_pull(*remote);
  EXPECT_EQ(this->transport_->connect(remote->address()).value(), peer);
  this->transport_->disconnect(peer);
  EXPECT_EQ(this->transport_->submit(this->pull(*remote, peer)).error().code, ErrorCode::kInvalidArgument);
  EXPECT_NE(this->connect_and_pull(*remote), peer);
}

TYPED_TEST(TransportTransfers, SubmitIsRefusedWhileTooManyAreInFlightOrUnread) {
  const auto remote = this->fixture_.make_remote(kBytes);
  this->reset(this->fixture_.make_transport(4));
  const PeerId peer = this->connect_and_pull(*remote);
  remote->stop();
  for (int accepted = 0; accepted < 4; ++accepted) ASSERT_TRUE(this->transport_->submit(this->pull(*remote, peer)));
  EXPECT_EQ(this->transport_->submit(this->pull(*remote, peer)).error().code, ErrorCode::kFull);
  remote->go_on();
  ASSERT_TRUE(is_readable(this->transport_->event_fd(), kPatience));
  EXPECT_EQ(this->transport_->submit(this->pull(*remote, peer)).error().code, ErrorCode::kFull) << "unread ones count";
  EXPECT_EQ(wait_completions(*this->transport_, 4).size(), 4U);
  EXPECT_TRUE(this->transport_->submit(this->pull(*remote, peer)));
  EXPECT_EQ(wait_completions(*this->transport_, 1).size(), 1U);
  this->expect_nothing_more();
}

TYPED_TEST(TransportTransfers, ManyThreadsSubmitAtOnceAndEachTransferCompletesOnce) {
  constexpr int kThreads = 4;
  constexpr int kEach = 60;
  const auto remote = this->fixture_.make_remote(kBytes);
  const PeerId peer = this->connect_and_pull(*remote);
  std::vector<std::vector<TransferId>> ids(kThreads);
  std::vector<std::thread> threads;
  for (std::size_t thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      for (std::uint64_t index = 0; index < kEach; ++index) {
        const std::uint64_t offset = (thread * kEach + index) * 8192;
        ids[thread].push_back(
            this->transport_->submit(this->pull(*remote, peer, {{offset, offset, 100}, {offset + 200, offset, 5000}}))
                .value());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::map<TransferId, int> num_completions;
  for (const Completion& completion : wait_completions(*this->transport_, kThreads * kEach)) {
    EXPECT_EQ(completion.code, ErrorCode::kOk);
    ++num_completions[completion.id];
  }
  for (const auto& mine : ids) {
    for (const TransferId id : mine) EXPECT_EQ(num_completions[id], 1);
  }
  EXPECT_EQ(num_completions.size(), static_cast<std::size_t>(kThreads * kEach));
  this->expect_nothing_more();
}

TYPED_TEST(TransportTransfers, ARegionInUseCannotBeUnregistered) {
  const auto remote = this->fixture_.make_remote(kBytes);
  const PeerId peer = this->connect_and_pull(*remote);
  remote->stop();
  const TransferId id = this->transport_->submit(this->pull(*remote, peer)).value();
  if (this->fixture_.needs_running_remote()) {
    EXPECT_EQ(code_of(this->transport_->unregister_region(this->region_)), ErrorCode::kFull);
  }
  remote->go_on();
  this->expect_one(id, ErrorCode::kOk);
  EXPECT_TRUE(this->transport_->unregister_region(this->region_));
  EXPECT_EQ(this->transport_->submit(this->pull(*remote, peer)).error().code, ErrorCode::kInvalidArgument);
  EXPECT_FALSE(this->transport_->export_region(this->region_));
  this->region_ = this->transport_->register_region(this->memory_.data(), kBytes).value();
  this->connect_and_pull(*remote);
}

}  // namespace
}  // namespace kvferry
