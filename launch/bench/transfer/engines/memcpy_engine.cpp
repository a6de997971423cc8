// Measures the limit that memory sets to the speed of copies: one thread copies the blocks between two memories of its
// process. Both are shared segments, or both are private memory. The target's shared segment is used through a second
// mapping.
#include <cstring>

#include "launch/bench/transfer/engine.h"

namespace kvferry::bench {
namespace {

class MemcpyEngine final : public Engine {
 public:
  nlohmann::json start(const WorkerSpec& spec, BenchMemory& memory) override {
    memory_ = memory.span();
    target_.emplace(spec.memory, spec.bytes);
    target_span_ = target_->span();
    if (target_->shared() != nullptr) {
      mapped_.emplace(need(SharedMemory::open(target_->shared()->name())));
      target_span_ = mapped_->span();
    }
    return nlohmann::json::object();
  }

  void connect(const nlohmann::json&) override {}

  void transfer() override {
    for (std::size_t i = 0; i < own_.size(); ++i) copy(i);
  }
  void ping() override { copy(0); }
  bool is_round_trip() const override { return false; }
  std::span<std::byte> target_memory() override { return target_span_; }

 private:
  void copy(std::size_t i) {
    std::byte* own = memory_.data() + own_[i];
    std::byte* other = target_span_.data() + others_[i];
    std::memcpy(job_.is_push ? other : own, job_.is_push ? own : other, job_.block_bytes);
  }

  std::span<std::byte> memory_;
  std::span<std::byte> target_span_;
  std::optional<BenchMemory> target_;
  std::optional<SharedMemory> mapped_;
};

}  // namespace

std::unique_ptr<Engine> make_memcpy_engine() { return std::make_unique<MemcpyEngine>(); }

}  // namespace kvferry::bench
