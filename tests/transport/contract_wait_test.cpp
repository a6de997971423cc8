// Tests how an owner learns that there is something to poll: the event descriptor and wait().
#include <algorithm>
#include <ctime>
#include <thread>

#include "tests/transport/contract.h"
#include "transport/base/net/event_fd.h"

namespace kvferry {
namespace {

using ::testing::IsEmpty;

template <class Backend>
class TransportWaiting : public TransportContract<Backend> {
 protected:
  bool wait(std::chrono::nanoseconds timeout) { return this->transport_->wait(timeout.count()); }
};
TYPED_TEST_SUITE(TransportWaiting, Fixtures, FixtureNames);

TYPED_TEST(TransportWaiting, TheEventDescriptorIsReadableExactlyWhileSomethingWaits) {
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

TYPED_TEST(TransportWaiting, WaitSaysWhetherSomethingIsThere) {
  const auto remote = this->fixture_.make_remote(kBytes);
  const PeerId peer = this->connect_and_pull(*remote);
  EXPECT_FALSE(this->wait(std::chrono::nanoseconds(0)));
  const auto began_at = std::chrono::steady_clock::now();
  EXPECT_FALSE(this->wait(std::chrono::milliseconds(20)));
  EXPECT_GE(std::chrono::steady_clock::now() - began_at, std::chrono::milliseconds(20)) << "gave up too early";
  for (int round = 0; round < 20; ++round) {
    const TransferId id = this->transport_->submit(this->pull(*remote, peer)).value();
    EXPECT_TRUE(this->wait(kPatience));
    EXPECT_TRUE(this->wait(std::chrono::nanoseconds(0))) << "nobody has polled";
    this->expect_one(id, ErrorCode::kOk);
  }
  EXPECT_FALSE(this->wait(std::chrono::milliseconds(1)));
}

TYPED_TEST(TransportWaiting, AnIdleOneCostsNextToNothing) {
  const auto remote = this->fixture_.make_remote(kBytes);
  this->connect_and_pull(*remote);
  const auto cpu_seconds = [] {
    timespec used{};
    ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
    return static_cast<double>(used.tv_sec) + 1e-9 * static_cast<double>(used.tv_nsec);
  };
  constexpr double kShareMax = 0.01;  // largest share of a processor that an idle transport may use
  std::this_thread::sleep_for(std::chrono::milliseconds(100));  // until work that follows the transfer has ended
  // Takes the best of several seconds, because on a busy machine the few wake-ups of one second may all find cold
  // caches.
  const auto least_used = [&](const auto& pass_a_second) {
    double least = 1;
    for (int second = 0; second < 4 && least >= kShareMax; ++second) {
      const double before = cpu_seconds();
      pass_a_second();
      least = std::min(least, cpu_seconds() - before);
    }
    return least;
  };
  EXPECT_LT(least_used([] { std::this_thread::sleep_for(std::chrono::seconds(1)); }), kShareMax);
  EXPECT_LT(least_used([&] { EXPECT_FALSE(this->wait(std::chrono::seconds(1))); }), kShareMax)
      << "while somebody waits";
}

TYPED_TEST(TransportWaiting, ANotificationEndsTheWaitOfItsReceiver) {
  const std::unique_ptr<Transport> other = this->fixture_.make_transport(1024);
  std::vector<std::byte> other_memory(kBytes);
  const RegionId region = other->register_region(other_memory.data(), kBytes).value();
  const std::string exported = this->transport_->export_region(this->region_).value();
  const PeerId peer = other->connect(this->transport_->address()).value();
  for (int round = 0; round < 20; ++round) {
    std::thread sender([&] {
      ASSERT_TRUE(other->submit({peer, Direction::kPush, region, exported, {{0, 0, 100}}, "here"}));
      EXPECT_EQ(wait_completions(*other, 1).size(), 1U);
    });
    EXPECT_TRUE(this->wait(kPatience));
    EXPECT_EQ(this->transport_->poll_notifications().size(), 1U);
    sender.join();
  }
}

TYPED_TEST(TransportWaiting, WhatAnotherThreadSubmitsOrCancelsEndsTheWait) {
  const auto remote = this->fixture_.make_remote(kBytes);
  const PeerId peer = this->connect_and_pull(*remote);
  for (int round = 0; round < 20; ++round) {
    std::thread submitter([&] { ASSERT_TRUE(this->transport_->submit(this->pull(*remote, peer))); });
    EXPECT_TRUE(this->wait(kPatience));
    EXPECT_EQ(this->transport_->poll().size(), 1U);
    submitter.join();
  }
  PagedTransfer fed = this->pull(*remote, peer);
  fed.is_fed = true;
  const TransferId id = this->transport_->submit(fed).value();
  std::thread canceller([&] { this->transport_->cancel(id); });
  EXPECT_TRUE(this->wait(kPatience));
  canceller.join();
  this->expect_one(id, ErrorCode::kCancelled);
}

TYPED_TEST(TransportWaiting, TwoThreadsMayWaitAtOnce) {
  const auto remote = this->fixture_.make_remote(kBytes);
  const PeerId peer = this->connect_and_pull(*remote);
  std::thread other([&] { EXPECT_TRUE(this->wait(kPatience)); });
  std::thread submitter([&] { ASSERT_TRUE(this->transport_->submit(this->pull(*remote, peer))); });
  EXPECT_TRUE(this->wait(kPatience));
  submitter.join();
  other.join();
  EXPECT_EQ(this->transport_->poll().size(), 1U);
}

TYPED_TEST(TransportWaiting, AReadableInterruptDescriptorEndsTheWait) {
  const auto remote = this->fixture_.make_remote(kBytes);
  EventFd interrupt;
  this->transport_->set_wait_interrupt_fd(interrupt.fd());
  const PeerId peer = this->connect_and_pull(*remote);
  EXPECT_FALSE(this->wait(std::chrono::milliseconds(1)));
  std::thread interrupter([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    interrupt.set();
  });
  const auto began_at = std::chrono::steady_clock::now();
  EXPECT_FALSE(this->wait(kPatience));
  EXPECT_FALSE(this->wait(kPatience)) << "it is still readable";
  EXPECT_LT(std::chrono::steady_clock::now() - began_at, kPatience / 2);
  interrupter.join();
  interrupt.clear();
  ASSERT_TRUE(this->transport_->submit(this->pull(*remote, peer)));
  EXPECT_TRUE(this->wait(kPatience));
}

TYPED_TEST(TransportWaiting, ShutdownEndsTheWaitWithWhatItCancels) {
  const auto remote = this->fixture_.make_remote(kBytes);
  const PeerId peer = this->connect_and_pull(*remote);
  PagedTransfer fed = this->pull(*remote, peer);
  fed.is_fed = true;
  const TransferId id = this->transport_->submit(fed).value();
  std::thread ender([&] { this->transport_->shutdown(); });
  EXPECT_TRUE(this->wait(kPatience));
  ender.join();
  this->expect_one(id, ErrorCode::kCancelled);
}

}  // namespace
}  // namespace kvferry
