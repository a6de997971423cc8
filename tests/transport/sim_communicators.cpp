#include "tests/transport/sim_communicators.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "transport/base/check.h"
#include "transport/base/owned_fd.h"

namespace kvferry {
namespace {

using Parts = std::vector<std::span<std::byte>>;

/// The state that the progress thread and the device share: the socket, and its condition.
class Core {
 public:
  Core(SimNccl options, const std::string& id, int rank) : options_(std::move(options)), is_listener_(rank == 0) {
    address_.sun_family = AF_UNIX;
    KVFERRY_CHECK(id.size() + 2 < sizeof(address_.sun_path), "the id is too long");
    std::memcpy(address_.sun_path + 1, id.data(), id.size());
    address_bytes_ = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + id.size());
    OwnedFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (is_listener_) {
      const int code = ::bind(socket.get(), reinterpret_cast<sockaddr*>(&address_), address_bytes_);
      KVFERRY_CHECK(code == 0 && ::listen(socket.get(), 1) == 0, "an id is used twice: {}", std::strerror(errno));
    }
    (is_listener_ ? listener_ : socket_) = std::move(socket);
    ++*options_.num_alive;
  }

  /// Returns whether both ranks are connected.
  bool meet() {
    const std::lock_guard lock(mutex_);
    if (is_met_) return true;
    if (is_listener_) {
      socket_ = OwnedFd(::accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
      is_met_ = socket_.get() >= 0;
      if (is_met_) listener_ = OwnedFd();
    } else {
      is_met_ = ::connect(socket_.get(), reinterpret_cast<const sockaddr*>(&address_), address_bytes_) == 0;
    }
    return is_met_;
  }

  bool has_failed() const {
    const std::lock_guard lock(mutex_);
    return is_dead_ && options_.death == SimNccl::Death::kFails;
  }
  bool is_aborted() const {
    const std::lock_guard lock(mutex_);
    return is_aborted_;
  }
  void abort() {
    const std::lock_guard lock(mutex_);
    is_aborted_ = true;
    socket_ = OwnedFd();
    listener_ = OwnedFd();
    --*options_.num_alive;
  }

  /// A group's work in a stream. send() and receive() return true when it has ended.
  struct Progress {
    Parts parts;
    std::size_t part = 0;
    std::uint64_t at = 0;  // position in the part's eight bytes of length, then in its bytes
    std::uint64_t length = 0;
    bool is_all_moved = false;
  };
  bool send(Progress& progress) {
    const std::lock_guard lock(mutex_);
    while (may_move() && !progress.is_all_moved) {
      const std::span<std::byte> part = progress.parts[progress.part];
      progress.length = part.size();
      if (!move(progress, part,
                [&](std::byte* from, std::size_t bytes) { return ::send(socket_.get(), from, bytes, MSG_NOSIGNAL); }))
        return is_aborted_;
    }
    char landed = 0;  // NCCL's sends may end earlier, so no code may rely on this
    return is_aborted_ || (progress.is_all_moved && may_move() &&
                           count(::recv(socket_.get(), &landed, sizeof(landed), 0)) == sizeof(landed));
  }
  bool receive(Progress& progress) {
    const std::lock_guard lock(mutex_);
    while (may_move() && !progress.is_all_moved) {
      const std::span<std::byte> part = progress.parts[progress.part];
      if (!move(progress, part, [&](std::byte* to, std::size_t bytes) { return ::recv(socket_.get(), to, bytes, 0); }))
        return is_aborted_;
      KVFERRY_CHECK(progress.at < sizeof(progress.length) || progress.length == part.size(),
                    "{} bytes are received of a send of {}", part.size(), progress.length);
    }
    const char landed = 1;
    return is_aborted_ || (progress.is_all_moved && may_move() &&
                           count(::send(socket_.get(), &landed, sizeof(landed), MSG_NOSIGNAL)) == sizeof(landed));
  }

 private:
  bool may_move() const { return !is_aborted_ && !is_dead_ && !options_.is_hung->load(); }
  /// Returns the number of moved bytes; 0 if none can be moved now or ever again.
  std::size_t count(ssize_t moved) {
    if (moved == 0 || (moved < 0 && errno != EAGAIN && errno != EINTR)) is_dead_ = true;
    return moved > 0 ? static_cast<std::size_t>(moved) : 0;
  }
  template <class Move>
  bool move(Progress& progress, std::span<std::byte> part, Move by) {
    constexpr std::uint64_t kHead = sizeof(progress.length);
    const bool is_head = progress.at < kHead;
    std::byte* const memory =
        is_head ? reinterpret_cast<std::byte*>(&progress.length) + progress.at : part.data() + (progress.at - kHead);
    const std::size_t moved = count(by(memory, is_head ? kHead - progress.at : kHead + part.size() - progress.at));
    progress.at += moved;
    if (progress.at < kHead + part.size()) return moved > 0;
    progress.at = 0;
    progress.is_all_moved = ++progress.part == progress.parts.size();
    return true;
  }

  const SimNccl options_;
  const bool is_listener_;
  sockaddr_un address_{};
  socklen_t address_bytes_ = 0;
  mutable std::mutex mutex_;
  OwnedFd listener_;
  OwnedFd socket_;
  bool is_met_ = false;
  bool is_dead_ = false;  // the other rank is dead
  bool is_aborted_ = false;
};

class SimCommunicator final : public nccl::Communicator {
 public:
  SimCommunicator(SimDevice& device, const SimNccl& options, const std::string& id, int rank)
      : device_(device), random_(options.seed), core_(std::make_shared<Core>(options, id, rank)) {}
  ~SimCommunicator() override {
    if (aborter_.joinable()) aborter_.join();
    KVFERRY_CHECK(core_->is_aborted(), "a communicator ends that was not aborted");
  }

  State state() override {
    if (aborter_.joinable()) return core_->is_aborted() ? State::kAborted : State::kBusy;
    if (core_->has_failed()) return State::kFailed;
    if (!core_->meet()) return State::kBusy;
    if (num_busy_ > 0 && --num_busy_ > 0) return State::kBusy;
    if (group_) std::exchange(group_, nullptr)();
    return State::kReady;
  }
  std::string why() const override { return "the simulated peer died"; }

  Result<void> send(std::span<const std::span<std::byte>> parts, DeviceStream stream) override {
    return begin(parts, stream, true);
  }
  Result<void> receive(std::span<const std::span<std::byte>> parts, DeviceStream stream) override {
    return begin(parts, stream, false);
  }
  void abort() override {
    KVFERRY_CHECK(!aborter_.joinable(), "a communicator is aborted twice");
    aborter_ = std::thread([core = core_] {
      std::this_thread::sleep_for(std::chrono::milliseconds(3));
      core->abort();
    });
  }

 private:
  /// The group enters the stream later, as NCCL's own may. So work that is enqueued too early runs before the group,
  /// and fails.
  Result<void> begin(std::span<const std::span<std::byte>> parts, DeviceStream stream, bool is_send) {
    KVFERRY_CHECK(!group_ && num_busy_ == 0 && !parts.empty(), "a communicator gets work too early");
    KVFERRY_CHECK(!is_used_ || is_sender_ == is_send, "a communicator is used in both directions");
    is_used_ = true;
    is_sender_ = is_send;
    auto progress = std::make_shared<Core::Progress>();
    progress->parts.assign(parts.begin(), parts.end());
    group_ = [this, progress, stream, is_send] {
      device_.enqueue(stream, [core = core_, progress, is_send] {
        return is_send ? core->send(*progress) : core->receive(*progress);
      });
    };
    num_busy_ = random_() % 3;
    if (num_busy_ == 0) std::exchange(group_, nullptr)();
    return {};
  }

  SimDevice& device_;
  std::mt19937 random_;
  const std::shared_ptr<Core> core_;
  std::function<void()> group_;  // a group that is not in its stream yet
  std::uint32_t num_busy_ = 0;
  bool is_used_ = false;
  bool is_sender_ = false;
  std::thread aborter_;
};

class SimCommunicators final : public nccl::Communicators {
 public:
  SimCommunicators(SimDevice& device, SimNccl options) : device_(device), options_(std::move(options)) {}
  std::string describe() const override { return "simulated NCCL"; }
  Result<std::string> make_id() override {
    std::random_device random;
    return fmt::format("kvferry-sim-nccl-{:08x}{:08x}", random(), random());
  }
  Result<std::unique_ptr<nccl::Communicator>> begin(const std::string& id, int rank) override {
    ++options_.seed;
    return std::unique_ptr<nccl::Communicator>(std::make_unique<SimCommunicator>(device_, options_, id, rank));
  }

 private:
  SimDevice& device_;
  SimNccl options_;
};

}  // namespace

std::unique_ptr<nccl::Communicators> make_sim_communicators(SimDevice& device, SimNccl options) {
  return std::make_unique<SimCommunicators>(device, std::move(options));
}

}  // namespace kvferry
