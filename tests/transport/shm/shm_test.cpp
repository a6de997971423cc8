// Tests what only the shared memory backend promises: after an owner has revoked memory, no peer copies to or from it
// any more.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/transport/backends.h"
#include "transport/backend_transport.h"
#include "transport/base/net/event_fd.h"
#include "transport/make_transport.h"
#include "transport/shared_memory.h"
#include "transport/shm/shared_page.h"
#include "transport/shm/shm_backend.h"

namespace kvferry {
namespace {

constexpr std::uint64_t kShmBytes = std::uint64_t{4} << 20;

/// Pushes all of its memory to a region repeatedly, until a push fails.
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

/// Reads an address and the descriptor of a region of 4096 bytes from the pipe, and pulls the region. Returns whether
/// all bytes are right.
bool pull_from(int pipe) {
  std::array<std::string, 2> received;
  for (std::string& text : received) {
    std::uint32_t size = 0;
    if (::read(pipe, &size, sizeof size) != sizeof size) return false;
    text.resize(size);
    if (::read(pipe, text.data(), size) != static_cast<ssize_t>(size)) return false;
  }
  const auto transport = make_backend("shm");
  std::vector<std::byte> memory(4096);
  PagedTransfer transfer;
  transfer.peer = transport->connect(received[0]).value();
  transfer.local = transport->register_region(memory.data(), memory.size()).value();
  transfer.remote_region = received[1];
  transfer.ranges = {{0, 0, memory.size()}};
  transport->submit(transfer).value();
  while (!transport->wait(kSecond)) continue;
  return transport->poll().at(0).code == ErrorCode::kOk && memory.back() == std::byte{0x5a};
}

TEST(ShmNamespaces, APeerThatSeesNoProcessIdReadsSharedMemory) {
  constexpr int kNotAllowed = 77;
  int pipe[2];
  ASSERT_EQ(::pipe(pipe), 0);
  const pid_t child = ::fork();  // forks before any transport has started threads
  if (child == 0) {
    if (::unshare(CLONE_NEWPID) != 0 && ::unshare(CLONE_NEWUSER | CLONE_NEWPID) != 0) ::_exit(kNotAllowed);
    const pid_t inner = ::fork();
    if (inner == 0) ::_exit(pull_from(pipe[0]) ? 0 : 1);
    int status = 1;
    ::waitpid(inner, &status, 0);
    ::_exit(WIFEXITED(status) ? WEXITSTATUS(status) : 1);
  }
  const SharedMemory memory = SharedMemory::create("pool", 4096).value();
  std::ranges::fill(memory.span(), std::byte{0x5a});
  const auto transport = make_backend("shm");
  const RegionId region = transport->register_region(memory.region()).value();
  for (const std::string& text : {transport->address(), transport->export_region(region).value()}) {
    const auto size = static_cast<std::uint32_t>(text.size());
    ASSERT_EQ(::write(pipe[1], &size, sizeof size), static_cast<ssize_t>(sizeof size));
    ASSERT_EQ(::write(pipe[1], text.data(), size), static_cast<ssize_t>(size));
  }
  int status = 1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  for (const int end : pipe) ::close(end);
  if (WIFEXITED(status) && WEXITSTATUS(status) == kNotAllowed) GTEST_SKIP() << "PID namespaces are not allowed here";
  EXPECT_EQ(status, 0);
}

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

TEST(ShmGrants, OneThatCannotBeRevokedYetIsKept) {
  auto made = std::make_unique<shm::ShmBackend>(ShmOptions{});
  ASSERT_TRUE(made->start());
  TransferTable& table = made->table();
  BackendTransport owner(std::move(made));
  std::vector<std::byte> memory(4096);
  const RegionId region = owner.register_region(MemoryRegion{memory.data(), memory.size()}).value();
  const GrantId grant = owner.grant(region, 0, 64).value();

  ASSERT_TRUE(table.begin_access(region, grant, 0, 1, true));  // as a request to map the region does
  EXPECT_EQ(owner.revoke(grant).error().code, ErrorCode::kFull);
  table.end_access(region, grant);
  const Result<void> revoked = owner.revoke(grant);
  EXPECT_TRUE(revoked) << revoked.error().what;
  EXPECT_EQ(owner.revoke(grant).error().code, ErrorCode::kInvalidArgument);

  const GrantId other = owner.grant(region, 0, 64).value();
  ASSERT_TRUE(table.begin_access(region, GrantId{}, 0, 1, true));
  EXPECT_EQ(owner.unregister_region(region).error().code, ErrorCode::kFull);
  EXPECT_TRUE(owner.revoke(other)) << "its region is still registered";
  table.end_access(region, GrantId{});
  EXPECT_TRUE(owner.unregister_region(region));
}

TEST(ShmNotifications, OnesOfAPeerThatHasGoneWaitForRoomInTheQueue) {
  auto made = std::make_unique<shm::ShmBackend>(ShmOptions{});
  ASSERT_TRUE(made->start());
  CompletionQueue& queue = made->table().completion_queue();
  BackendTransport target(std::move(made));
  std::vector<std::byte> memory(64);
  const RegionId region = target.register_region(MemoryRegion{memory.data(), memory.size()}).value();
  while (queue.notify({"", "unread"})) continue;
  {
    const auto sender = make_backend("shm");
    PagedTransfer transfer{sender->connect(target.address()).value(),
                           Direction::kPush,
                           sender->register_region(memory.data(), memory.size()).value(),
                           target.export_region(region).value(),
                           {},
                           "the last one"};
    sender->submit(transfer).value();
    while (!sender->wait(kSecond)) continue;
    EXPECT_EQ(sender->poll().at(0).code, ErrorCode::kOk);
  }
  ::usleep(200'000);  // the target closes the connection
  EXPECT_EQ(target.poll_notifications().size(), CompletionQueue::kNotificationsMax);
  EXPECT_TRUE(target.wait(10 * kSecond));
  const std::vector<Notification> late = target.poll_notifications();
  ASSERT_EQ(late.size(), 1U);
  EXPECT_EQ(late[0].body, "the last one");
}

TEST(ShmWaiting, AnInterruptEndsTheWaitOfAThreadThatPolls) {
  ShmOptions options;
  options.spin_ns = 3600 * kSecond;
  const auto transport = make_shm_transport(options).value();
  EventFd interrupt;
  interrupt.set();
  transport->set_wait_interrupt_fd(interrupt.fd());
  EXPECT_FALSE(transport->wait(options.spin_ns));
}

TEST(ShmFiles, OnesThatTheirPeerCanShrinkAreNotMapped) {
  const auto map = [](int fd) { return shm::map_peers_file(OwnedFd(fd), 0, 4096, true).error().code; };
  for (const unsigned flags : {MFD_CLOEXEC, MFD_CLOEXEC | MFD_ALLOW_SEALING}) {
    const int in_memory = ::memfd_create("unsealed", flags);
    ASSERT_EQ(::ftruncate(in_memory, 4096), 0);
    EXPECT_EQ(map(in_memory), ErrorCode::kRefused);
  }
  // this file does not support seals
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::tmpfile(), &std::fclose);
  ASSERT_EQ(::ftruncate(::fileno(file.get()), 4096), 0);
  EXPECT_EQ(map(::dup(::fileno(file.get()))), ErrorCode::kRefused);
  const SharedMemory sealed = SharedMemory::create("sealed", 4096).value();
  EXPECT_TRUE(shm::map_peers_file(OwnedFd(::dup(sealed.region().fd)), 0, 4096, true));
}

}  // namespace
}  // namespace kvferry
