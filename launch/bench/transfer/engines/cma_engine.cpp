// Measures the kernel's limit for memory that is not shared: process_vm_readv() and process_vm_writev(), with up to as
// many ranges per call as the kernel allows, and without notifications.
#include <sys/prctl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "launch/bench/transfer/engine.h"

namespace kvferry::bench {
namespace {

constexpr std::size_t kCmaRangesMax = 1024;  // the kernel's UIO_MAXIOV

class CmaEngine final : public Engine {
 public:
  nlohmann::json start(const WorkerSpec&, BenchMemory& memory) override {
    memory_ = memory.span();
    ::prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY);  // fails on a kernel without Yama, which does not need this call
    return {{"pid", ::getpid()}, {"base", reinterpret_cast<std::uintptr_t>(memory_.data())}};
  }

  void connect(const nlohmann::json& peer) override {
    pid_ = peer.value("pid", 0);
    base_ = peer.value("base", std::uintptr_t{0});
  }

  void transfer() override { copy(own_.size()); }
  void ping() override { copy(1); }
  bool is_round_trip() const override { return false; }

 private:
  void copy(std::size_t num_blocks) {
    for (std::size_t begin = 0; begin < num_blocks; begin += kCmaRangesMax) {
      const std::size_t count = std::min(kCmaRangesMax, num_blocks - begin);
      for (std::size_t i = 0; i < count; ++i) {
        own_ranges_[i] = {memory_.data() + own_[begin + i], job_.block_bytes};
        others_ranges_[i] = {reinterpret_cast<void*>(base_ + others_[begin + i]), job_.block_bytes};
      }
      const ssize_t moved = job_.is_push ? ::process_vm_writev(pid_, own_ranges_, count, others_ranges_, count, 0)
                                         : ::process_vm_readv(pid_, own_ranges_, count, others_ranges_, count, 0);
      if (moved != static_cast<ssize_t>(count * job_.block_bytes))
        throw Failure({ErrorCode::kUnavailable,
                       fmt::format("copying between the benchmark's two processes by {} failed: {}",
                                   job_.is_push ? "process_vm_writev()" : "process_vm_readv()",
                                   moved < 0 ? std::strerror(errno) : "the kernel copied only a part of the bytes")});
    }
  }

  std::span<std::byte> memory_;
  pid_t pid_ = 0;
  std::uintptr_t base_ = 0;
  iovec own_ranges_[kCmaRangesMax];
  iovec others_ranges_[kCmaRangesMax];
};

}  // namespace

std::unique_ptr<Engine> make_cma_engine() { return std::make_unique<CmaEngine>(); }

}  // namespace kvferry::bench
