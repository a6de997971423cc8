// The promises of transport/transport.h, written once for all backends. A backend adds its fixture to Fixtures.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <thread>

#include "tests/transport/loopback_fixture.h"
#include "tests/transport/process_fixture.h"

namespace kvferry {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

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
  /// Connects and proves it with one small pull.
  PeerId connect_and_pull(const Remote& remote) {
    const PeerId peer = transport_->connect(remote.address()).value();
    const TransferId id = transport_->submit(pull(remote, peer)).value();
    EXPECT_THAT(wait_completions(*transport_, 1), ElementsAre(Completion{id, ErrorCode::kOk, ""}));
    return peer;
  }
  void expect_one(TransferId id, ErrorCode code) {
    const std::vector<Completion> completions = wait_completions(*transport_, 1);
    ASSERT_EQ(completions.size(), 1U) << "no completion in time";
    EXPECT_EQ(completions[0].id, id);
    EXPECT_EQ(completions[0].code, code) << completions[0].what;
    EXPECT_EQ(completions[0].what.empty(), code == ErrorCode::kOk);
  }
  /// The last act of a test: nobody completes a second time, not even when everything ends.
  void expect_nothing_more() {
    transport_->shutdown();
    EXPECT_THAT(transport_->poll(), IsEmpty());
  }

  Backend fixture_;
  std::vector<std::byte> memory_ = std::vector<std::byte>(kBytes);
  std::unique_ptr<Transport> transport_;
  RegionId region_;
};

using Fixtures = ::testing::Types<LoopbackFixture, UcxFixture, ShmFixture, CmaFixture>;
TYPED_TEST_SUITE(TransportContract, Fixtures);

TYPED_TEST(TransportContract, PullBringsExactlyTheNamedBytes) {
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
    std::vector<std::byte> expected = this->memory_;
    for (const CopyRange& range : ranges)
      std::memcpy(expected.data() + range.local_offset, remote->memory().data() + range.remote_offset, range.bytes);
    const TransferId id = this->transport_->submit(this->pull(*remote, peer, ranges)).value();
    this->expect_one(id, ErrorCode::kOk);
    EXPECT_TRUE(this->memory_ == expected) << "seed " << seed << ", " << shape.num_ranges << " ranges";
  }
  this->expect_nothing_more();
}

TYPED_TEST(TransportContract, PushDeliversExactlyTheNamedBytesAndThenTheNotification) {
  const auto remote = this->fixture_.make_remote(kBytes);
  const PeerId peer = this->connect_and_pull(*remote);
  std::uint64_t seed = 100;
  for (const std::size_t num_ranges : {0, 1, 3000}) {
    const std::vector<CopyRange> ranges = random_ranges(++seed, num_ranges, num_ranges == 1 ? kBytes - 2 : 1000);
    fill(this->memory_, seed);
    fill(remote->memory(), seed + 1000);
    std::vector<std::byte> expected(remote->memory().begin(), remote->memory().end());
    for (const CopyRange& range : ranges)
      std::memcpy(expected.data() + range.remote_offset, this->memory_.data() + range.local_offset, range.bytes);
    PagedTransfer push{peer, Direction::kPush, this->region_, remote->region(), ranges, "pushed"};
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

TYPED_TEST(TransportContract, APullNotifiesThePeerToo) {
  const auto remote = this->fixture_.make_remote(kBytes);
  PagedTransfer transfer = this->pull(*remote, this->transport_->connect(remote->address()).value());
  transfer.notification = std::string(60'000, 'x');
  const TransferId id = this->transport_->submit(transfer).value();
  const std::vector<Notification> notes = remote->wait_notifications(1);
  ASSERT_EQ(notes.size(), 1U);
  EXPECT_EQ(notes[0].body, transfer.notification);
  this->expect_one(id, ErrorCode::kOk);
}

TYPED_TEST(TransportContract, TwoTransportsPullFromEachOtherAndNotify) {
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

TYPED_TEST(TransportContract, BadTransfersAreRefusedAndNothingHappens) {
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
  bad[11].remote_region = this->transport_->export_region(this->region_).value();  // not the peer's
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

TYPED_TEST(TransportContract, ConnectingTwiceGivesOnePeerUntilItIsDisconnected) {
  const auto remote = this->fixture_.make_remote(kBytes);
  const PeerId peer = this->connect_and_pull(*remote);
  EXPECT_EQ(this->transport_->connect(remote->address()).value(), peer);
  this->transport_->disconnect(peer);
  EXPECT_EQ(this->transport_->submit(this->pull(*remote, peer)).error().code, ErrorCode::kInvalidArgument);
  EXPECT_NE(this->connect_and_pull(*remote), peer);
}

TYPED_TEST(TransportContract, DisconnectEndsTransfersInFlight) {
  const auto remote = this->fixture_.make_remote(kBytes);
  const PeerId peer = this->connect_and_pull(*remote);
  remote->stop();
  const TransferId id = this->transport_->submit(this->pull(*remote, peer)).value();
  wait_until_posted(*this->transport_);
  this->transport_->disconnect(peer);
  this->expect_one(id, ErrorCode::kPeerLost);
  this->expect_nothing_more();
}

TYPED_TEST(TransportContract, SubmitIsRefusedWhileTooManyAreInFlightOrUnread) {
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

TYPED_TEST(TransportContract, CancelOfATransferThatIsStuckCompletesInBoundedTime) {
  const auto remote = this->fixture_.make_remote(kBytes);
  const PeerId peer = this->connect_and_pull(*remote);
  remote->stop();
  const TransferId id = this->transport_->submit(this->pull(*remote, peer, random_ranges(5, 2000, 2000))).value();
  wait_until_posted(*this->transport_);
  const auto asked_at = std::chrono::steady_clock::now();
  this->transport_->cancel(id);
  this->transport_->cancel(id);
  this->expect_one(id, ErrorCode::kCancelled);
  EXPECT_LT(std::chrono::steady_clock::now() - asked_at, std::chrono::seconds(10));
  const std::vector<std::byte> quiet = this->memory_;
  fill(remote->memory(), 77);
  remote->go_on();
  this->connect_and_pull(*remote);  // the remote's progress thread has been round again
  EXPECT_TRUE(std::equal(quiet.begin() + 4096, quiet.end(), this->memory_.begin() + 4096))
      << "written after its completion";
  this->expect_nothing_more();
}

TYPED_TEST(TransportContract, CancelOfARunningTransferCompletesItOnce) {
  const auto remote = this->fixture_.make_remote(kBytes);
  const PeerId peer = this->connect_and_pull(*remote);
  for (std::uint64_t round = 0; round < 20; ++round) {
    const TransferId id = this->transport_->submit(this->pull(*remote, peer, random_ranges(round, 500, 4000))).value();
    this->transport_->cancel(id);
    const std::vector<Completion> completions = wait_completions(*this->transport_, 1);
    ASSERT_EQ(completions.size(), 1U);
    EXPECT_EQ(completions[0].id, id);
    EXPECT_TRUE(completions[0].code == ErrorCode::kOk || completions[0].code == ErrorCode::kCancelled);
  }
  this->transport_->cancel(TransferId{12345});
  this->expect_nothing_more();
}

TYPED_TEST(TransportContract, APeerKilledInMidTransferIsLost) {
  const auto remote = this->fixture_.make_remote(kBytes);
  const PeerId peer = this->connect_and_pull(*remote);
  remote->stop();
  std::map<TransferId, int> num_completions;
  for (const Direction direction : {Direction::kPull, Direction::kPush, Direction::kPull}) {
    PagedTransfer transfer = this->pull(*remote, peer, random_ranges(9, 1500, 2500));
    transfer.direction = direction;
    num_completions[this->transport_->submit(transfer).value()] = 0;
  }
  wait_until_posted(*this->transport_);
  remote->kill();
  for (const Completion& completion : wait_completions(*this->transport_, 3)) {
    EXPECT_EQ(completion.code, ErrorCode::kPeerLost);
    EXPECT_FALSE(completion.what.empty());
    ++num_completions[completion.id];
  }
  for (const auto& [id, count] : num_completions) EXPECT_EQ(count, 1);

  const TransferId late = this->transport_->submit(this->pull(*remote, peer)).value();
  this->expect_one(late, ErrorCode::kPeerLost);
  EXPECT_NE(this->transport_->connect(remote->address()).value(), peer) << "lost in between";
  this->expect_nothing_more();
}

TYPED_TEST(TransportContract, APeerKilledAtAnyMomentCompletesEverythingOnce) {
  for (std::uint64_t round = 0; round < 4; ++round) {
    const auto remote = this->fixture_.make_remote(kBytes);
    const PeerId peer = this->connect_and_pull(*remote);
    std::map<TransferId, int> num_completions;
    for (std::uint64_t index = 0; index < 8; ++index) {
      PagedTransfer transfer = this->pull(*remote, peer, random_ranges(index, 300, 10'000));
      if (index % 2 == 1) transfer.direction = Direction::kPush;
      num_completions[this->transport_->submit(transfer).value()] = 0;
    }
    const auto count_more = [&] {
      const std::vector<Completion> completions = wait_completions(*this->transport_, 1);
      EXPECT_FALSE(completions.empty()) << "a transfer never completed";
      for (const Completion& completion : completions) {
        EXPECT_TRUE(completion.code == ErrorCode::kOk || completion.code == ErrorCode::kPeerLost) << completion.what;
        ++num_completions[completion.id];
      }
      return !completions.empty();
    };
    if (round > 0) {
      ASSERT_TRUE(count_more());
    }
    remote->kill();
    const auto is_missing = [](const auto& one) { return one.second == 0; };
    while (std::any_of(num_completions.begin(), num_completions.end(), is_missing)) ASSERT_TRUE(count_more());
    for (const auto& [id, count] : num_completions) EXPECT_EQ(count, 1);
  }
  this->expect_nothing_more();
}

TYPED_TEST(TransportContract, APeerThatShutsDownIsLostAndItsSuccessorIsAnother) {
  auto remote = this->fixture_.make_remote(kBytes);
  const PeerId peer = this->connect_and_pull(*remote);
  remote->shut_down();
  const TransferId id = this->transport_->submit(this->pull(*remote, peer)).value();
  this->expect_one(id, ErrorCode::kPeerLost);

  const auto successor = this->fixture_.make_remote(kBytes);
  fill(successor->memory(), 3);
  const PeerId next = this->connect_and_pull(*successor);
  EXPECT_NE(next, peer);
  EXPECT_TRUE(std::equal(this->memory_.begin(), this->memory_.begin() + 4096, successor->memory().begin()));
  EXPECT_EQ(this->transport_->submit(this->pull(*remote, next)).error().code, ErrorCode::kInvalidArgument)
      << "the predecessor's region";
  this->expect_nothing_more();
}

TYPED_TEST(TransportContract, APeerThatIsGoneBeforeTheFirstTransferIsLost) {
  const auto remote = this->fixture_.make_remote(kBytes);
  const PeerId peer = this->transport_->connect(remote->address()).value();
  remote->kill();
  const TransferId id = this->transport_->submit(this->pull(*remote, peer)).value();
  this->expect_one(id, ErrorCode::kPeerLost);
}

TYPED_TEST(TransportContract, ShutdownCancelsWhatIsInFlight) {
  const auto remote = this->fixture_.make_remote(kBytes);
  const PeerId peer = this->connect_and_pull(*remote);
  remote->stop();
  std::vector<TransferId> ids;
  for (int index = 0; index < 3; ++index) ids.push_back(this->transport_->submit(this->pull(*remote, peer)).value());
  wait_until_posted(*this->transport_);
  this->transport_->shutdown();
  std::vector<TransferId> completed;
  for (const Completion& completion : this->transport_->poll()) {
    EXPECT_EQ(completion.code, ErrorCode::kCancelled);
    completed.push_back(completion.id);
  }
  EXPECT_THAT(completed, ::testing::UnorderedElementsAreArray(ids));
  EXPECT_FALSE(this->transport_->submit(this->pull(*remote, peer)));
  EXPECT_FALSE(this->transport_->connect(remote->address()));
  EXPECT_FALSE(this->transport_->register_region(this->memory_.data(), 1));
  this->transport_->disconnect(peer);
  this->expect_nothing_more();
}

TYPED_TEST(TransportContract, OneDeadPeerDoesNotDisturbAnother) {
  const auto dead = this->fixture_.make_remote(kBytes);
  const auto alive = this->fixture_.make_remote(kBytes);
  fill(alive->memory(), 11);
  const PeerId dead_peer = this->connect_and_pull(*dead);
  const PeerId alive_peer = this->connect_and_pull(*alive);
  const TransferId lost = this->transport_->submit(this->pull(*dead, dead_peer)).value();
  wait_completions(*this->transport_, 1);
  dead->kill();
  const TransferId good = this->transport_->submit(this->pull(*alive, alive_peer, {{0, 0, kBytes}})).value();
  const TransferId bad = this->transport_->submit(this->pull(*dead, dead_peer)).value();
  std::map<TransferId, ErrorCode> codes;
  for (const Completion& completion : wait_completions(*this->transport_, 2)) codes[completion.id] = completion.code;
  EXPECT_THAT(codes, ElementsAre(std::pair{good, ErrorCode::kOk}, std::pair{bad, ErrorCode::kPeerLost}));
  EXPECT_LT(lost, good);
  EXPECT_TRUE(std::equal(this->memory_.begin(), this->memory_.end(), alive->memory().begin()));
  this->expect_nothing_more();
}

TYPED_TEST(TransportContract, ManyThreadsSubmitAtOnceAndEachTransferCompletesOnce) {
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

TYPED_TEST(TransportContract, TheEventDescriptorIsReadableExactlyWhileSomethingWaits) {
  const auto remote = this->fixture_.make_remote(kBytes);
  const PeerId peer = this->connect_and_pull(*remote);
  EXPECT_FALSE(is_readable(this->transport_->event_fd()));
  ASSERT_TRUE(this->transport_->submit(this->pull(*remote, peer)));
  EXPECT_TRUE(is_readable(this->transport_->event_fd(), kPatience));
  EXPECT_THAT(this->transport_->poll_notifications(), IsEmpty());
  EXPECT_TRUE(is_readable(this->transport_->event_fd())) << "the completion still waits";
  EXPECT_EQ(this->transport_->poll().size(), 1U);
  EXPECT_FALSE(is_readable(this->transport_->event_fd()));
}

TYPED_TEST(TransportContract, ARegionInUseCannotBeUnregistered) {
  const auto remote = this->fixture_.make_remote(kBytes);
  const PeerId peer = this->connect_and_pull(*remote);
  remote->stop();
  const TransferId id = this->transport_->submit(this->pull(*remote, peer)).value();
  EXPECT_EQ(this->transport_->unregister_region(this->region_).error().code, ErrorCode::kFull);
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
