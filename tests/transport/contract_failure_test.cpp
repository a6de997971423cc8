// Tests failures during transfers: each accepted transfer completes exactly once, and its memory is not accessed
// afterwards.
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <map>

#include "tests/transport/contract.h"

namespace kvferry {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

/// Stops all threads of this process for a while, as if its host was paused or moved.
void pause_this_process(std::chrono::milliseconds time) {
  const pid_t own = ::getpid();
  const pid_t waker = ::fork();
  ASSERT_GE(waker, 0);
  if (waker == 0) {  // the child uses only system calls, because other threads may have held locks at the fork
    ::kill(own, SIGSTOP);
    ::usleep(static_cast<useconds_t>(time.count()) * 1000);
    ::kill(own, SIGCONT);
    ::_exit(0);
  }
  ::waitpid(waker, nullptr, 0);
}

template <class Backend>
class TransportFailures : public TransportContract<Backend> {};
TYPED_TEST_SUITE(TransportFailures, Fixtures, FixtureNames);

TYPED_TEST(TransportFailures, DisconnectEndsTransfersInFlight) {
  const auto remote = this->fixture_.make_remote(kBytes);
  const PeerId peer = this->connect_and_pull(*remote);
  remote->stop();
  const TransferId id = this->transport_->submit(this->pull(*remote, peer)).value();
  wait_until_posted(*this->transport_);
  this->transport_->disconnect(peer);
  this->expect_one_without_remote(id, ErrorCode::kPeerLost);
  this->expect_nothing_more();
}

TYPED_TEST(TransportFailures, CancelOfATransferThatIsStuckCompletesInBoundedTime) {
  const auto remote = this->fixture_.make_remote(kBytes);
  const PeerId peer = this->connect_and_pull(*remote);
  remote->stop();
  const TransferId id = this->transport_->submit(this->pull(*remote, peer, random_ranges(5, 2000, 2000))).value();
  wait_until_posted(*this->transport_);
  const auto asked_at = std::chrono::steady_clock::now();
  this->transport_->cancel(id);
  this->transport_->cancel(id);
  this->expect_one_without_remote(id, ErrorCode::kCancelled);
  EXPECT_LT(std::chrono::steady_clock::now() - asked_at, std::chrono::seconds(10));
  const std::vector<std::byte> quiet = this->memory_;
  fill(remote->memory(), 77);
  remote->go_on();
  this->connect_and_pull(*remote);  // now the remote's progress thread has finished another round
  EXPECT_TRUE(std::equal(quiet.begin() + 4096, quiet.end(), this->memory_.begin() + 4096))
      << "written after its completion";
  this->expect_nothing_more();
}

TYPED_TEST(TransportFailures, CancelOfARunningTransferCompletesItOnce) {
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

TYPED_TEST(TransportFailures, APeerKilledInMidTransferIsLost) {
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
    this->expect_outcome_without_remote(completion, ErrorCode::kPeerLost);
    ++num_completions[completion.id];
  }
  for (const auto& [id, count] : num_completions) EXPECT_EQ(count, 1);

  this->expect_lost(*remote, peer);
  EXPECT_NE(this->transport_->connect(remote->address()).value(), peer) << "lost in between";
  this->expect_nothing_more();
}

TYPED_TEST(TransportFailures, APeerKilledAtAnyMomentCompletesEverythingOnce) {
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

TYPED_TEST(TransportFailures, AStoppedPeerThatOwesAnAnswerIsLostAndMayComeBack) {
  if (!this->fixture_.notices_silence()) GTEST_SKIP() << "silence is not noticed here";
  const auto remote = this->fixture_.make_remote(kBytes);
  const PeerId peer = this->connect_and_pull(*remote);
  for (const Direction direction : {Direction::kPull, Direction::kPush}) {
    remote->stop();
    PagedTransfer transfer =
        this->pull(*remote, this->transport_->connect(remote->address()).value(), {{0, 0, kBytes}});
    transfer.direction = direction;
    this->expect_one_without_remote(this->transport_->submit(transfer).value(), ErrorCode::kPeerLost);
    remote->go_on();
    const PeerId again = this->connect_and_pull(*remote);
    EXPECT_TRUE(again != peer || !this->fixture_.needs_running_remote());
  }
  this->expect_nothing_more();
}

TYPED_TEST(TransportFailures, APauseOfBothSidesLosesNobody) {
  if (!this->fixture_.notices_silence()) GTEST_SKIP() << "silence is not noticed here";
  const auto known = this->fixture_.make_remote(kBytes), other = this->fixture_.make_remote(kBytes);
  this->connect_and_pull(*known);
  std::map<TransferId, int> num_completions;
  for (const auto& remote : {known.get(), other.get()}) {
    remote->stop();
    const PeerId peer = this->transport_->connect(remote->address()).value();
    num_completions[this->transport_->submit(this->pull(*remote, peer, {{0, 0, kBytes}})).value()] = 0;
  }
  wait_until_posted(*this->transport_);
  pause_this_process(std::chrono::milliseconds(2500));          // long enough for a stopped peer to be lost
  std::this_thread::sleep_for(std::chrono::milliseconds(200));  // the peers answer even later than that
  for (const auto& remote : {known.get(), other.get()}) remote->go_on();
  for (const Completion& completion : wait_completions(*this->transport_, 2)) {
    EXPECT_EQ(completion.code, ErrorCode::kOk) << completion.what;
    ++num_completions[completion.id];
  }
  for (const auto& [id, count] : num_completions) EXPECT_EQ(count, 1);
  this->expect_nothing_more();
}

TYPED_TEST(TransportFailures, APeerThatShutsDownIsLostAndItsSuccessorIsAnother) {
  auto remote = this->fixture_.make_remote(kBytes);
  const PeerId peer = this->connect_and_pull(*remote);
  remote->shut_down();
  this->expect_lost(*remote, peer);

  const auto successor = this->fixture_.make_remote(kBytes);
  fill(successor->memory(), 3);
  const PeerId next = this->connect_and_pull(*successor);
  EXPECT_NE(next, peer);
  EXPECT_TRUE(std::equal(this->memory_.begin(), this->memory_.begin() + 4096, successor->memory().begin()));
  EXPECT_EQ(this->transport_->submit(this->pull(*remote, next)).error().code, ErrorCode::kInvalidArgument)
      << "the predecessor's region";
  this->expect_nothing_more();
}

TYPED_TEST(TransportFailures, APeerThatIsGoneBeforeTheFirstTransferIsLost) {
  const auto remote = this->fixture_.make_remote(kBytes);
  const PeerId peer = this->transport_->connect(remote->address()).value();
  remote->kill();
  const TransferId id = this->transport_->submit(this->pull(*remote, peer)).value();
  this->expect_one(id, ErrorCode::kPeerLost);
}

TYPED_TEST(TransportFailures, ShutdownCancelsWhatIsInFlight) {
  const auto remote = this->fixture_.make_remote(kBytes);
  const PeerId peer = this->connect_and_pull(*remote);
  remote->stop();
  std::vector<TransferId> ids;
  for (int index = 0; index < 3; ++index) ids.push_back(this->transport_->submit(this->pull(*remote, peer)).value());
  wait_until_posted(*this->transport_);
  this->transport_->shutdown();
  std::vector<TransferId> completed;
  for (const Completion& completion : this->transport_->poll()) {
    this->expect_outcome_without_remote(completion, ErrorCode::kCancelled);
    completed.push_back(completion.id);
  }
  EXPECT_THAT(completed, ::testing::UnorderedElementsAreArray(ids));
  EXPECT_FALSE(this->transport_->submit(this->pull(*remote, peer)));
  EXPECT_FALSE(this->transport_->feed(ids[0], {}, {}, true));
  EXPECT_FALSE(this->transport_->connect(remote->address()));
  EXPECT_FALSE(this->transport_->register_region(this->memory_.data(), 1));
  this->transport_->disconnect(peer);
  EXPECT_TRUE(this->transport_->unregister_region(this->region_)) << "its memory may be unmapped";
  this->expect_nothing_more();
}

TYPED_TEST(TransportFailures, OneDeadPeerDoesNotDisturbAnother) {
  const auto dead = this->fixture_.make_remote(kBytes);
  const auto alive = this->fixture_.make_remote(kBytes);
  fill(alive->memory(), 11);
  const PeerId dead_peer = this->connect_and_pull(*dead);
  const PeerId alive_peer = this->connect_and_pull(*alive);
  dead->kill();
  this->expect_lost(*dead, dead_peer);
  const TransferId good = this->transport_->submit(this->pull(*alive, alive_peer, {{0, 0, kBytes}})).value();
  this->expect_one(good, ErrorCode::kOk);
  EXPECT_TRUE(std::equal(this->memory_.begin(), this->memory_.end(), alive->memory().begin()));
  this->expect_nothing_more();
}

}  // namespace
}  // namespace kvferry
