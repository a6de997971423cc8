// What only the shared memory backend promises: who takes memory back knows that no peer copies any more.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <thread>
#include <vector>

#include "tests/transport/backends.h"
#include "transport/shared_memory.h"

namespace kvferry {
namespace {

constexpr std::uint64_t kShmBytes = std::uint64_t{4} << 20;

/// Pushes all of its memory to a region again and again until one push does not end well.
class Pusher {
 public:
  Pusher(const std::string& backend, const std::string& address, const std::string& region)
      : transport_(make_backend(backend)), memory_(kShmBytes, std::byte{0x5a}) {
    transfer_.peer = transport_->connect(address).value();
    transfer_.direction = Direction::kPush;
    transfer_.local = transport_->register_region(memory_.data(), kShmBytes).value();
    transfer_.remote_region = region;
    transfer_.ranges = {{0, 0, kShmBytes}};
    thread_ = std::thread([this] { push(); });
  }
  ~Pusher() { thread_.join(); }
  void await_pushes(int count) const {
    const int until = num_ok_ + count;
    while (num_ok_ < until) ::usleep(100);
  }
  Completion last() {
    thread_.join();
    thread_ = std::thread([] {});
    return last_;
  }

 private:
  void push() {
    do {
      transport_->submit(transfer_).value();
      while (!transport_->wait(kSecond)) continue;
      last_ = transport_->poll().at(0);
      ++num_ok_;
    } while (last_.code == ErrorCode::kOk);
  }

  std::unique_ptr<Transport> transport_;
  std::vector<std::byte> memory_;
  PagedTransfer transfer_;
  std::atomic<int> num_ok_{0};
  Completion last_;
  std::thread thread_;
};

class ShmFence : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Shm, ShmFence, ::testing::Values("shm", "cma"),
                         [](const auto& test) { return std::string(test.param); });

TEST_P(ShmFence, NobodyWritesToARegionOnceItIsUnregistered) {
  for (int round = 0; round < 20; ++round) {
    const auto owner = make_backend(GetParam());
    const SharedMemory memory = SharedMemory::create("fence", kShmBytes).value();
    const RegionId region = owner->register_region(memory.region()).value();
    Pusher pusher(GetParam(), owner->address(), owner->export_region(region).value());
    pusher.await_pushes(2);
    Result<void> gone = owner->unregister_region(region);
    while (!gone && gone.error().code == ErrorCode::kFull) gone = owner->unregister_region(region);
    ASSERT_TRUE(gone) << gone.error().what;
    std::fill_n(memory.data(), kShmBytes, std::byte{0});
    EXPECT_EQ(pusher.last().code, ErrorCode::kRefused);
    EXPECT_EQ(std::count(memory.data(), memory.data() + kShmBytes, std::byte{0}), kShmBytes);
  }
}

TEST_P(ShmFence, MemoryMayBeUnmappedOnceItsTransportIsShutDown) {
  for (int round = 0; round < 20; ++round) {
    void* const memory = ::mmap(nullptr, kShmBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(memory, MAP_FAILED);
    const auto owner = make_backend(GetParam());
    const RegionId region = owner->register_region(memory, kShmBytes).value();
    Pusher pusher(GetParam(), owner->address(), owner->export_region(region).value());
    pusher.await_pushes(2);
    owner->shutdown();
    ::munmap(memory, kShmBytes);
    const Completion last = pusher.last();
    EXPECT_EQ(last.code, ErrorCode::kPeerLost) << last.what;
  }
}

}  // namespace
}  // namespace kvferry
