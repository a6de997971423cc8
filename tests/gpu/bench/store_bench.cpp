// Measures the chunk store of a GPU: 8192 tokens of Llama-3.1-8B (1 GiB) in chunks of 256, saved from blocks and loaded
// into other blocks, bit by bit the same. Figures are medians of kRounds rounds, beside copies of the same bytes.
//
// "blocked" is the host's time within the call. "stream" is the time until the engine's stream may go on, "done" the
// time until the store reports the outcome. Each case runs on an idle stream, and behind 10 ms of kernels
// as the forward pass of a step is.
#include <fmt/format.h>

#include <thread>

#include "connector/runtime/store/chunk_store.h"
#include "kernels/stream_packer.h"
#include "tests/gpu/bench/bench_tools.h"
#include "tests/gpu/bench/pattern_cache.h"
#include "tests/gpu/bench/rival_kernels.h"
#include "tests/gpu/device_cache.h"
#include "transport/make_transport.h"
#include "transport/shared_memory.h"

namespace kvferry {
namespace {

constexpr std::uint32_t kTokens = 8192, kChunkTokens = 256, kChunks = kTokens / kChunkTokens;
constexpr std::uint64_t kChunkBytes = kChunkTokens * PatternCache::kTokenBytes, kBytes = kChunks * kChunkBytes;
constexpr double kStepMs = 10;
constexpr int kRounds = 5;

struct Times {
  double blocked = 0, stream = 0, done = 0;
};

/// Loads, and waits for the outcomes, from a store that loads before it returns or one that reports loads later.
template <class Store>
std::vector<LoadOutcome> load_all(Store& store, const LoadJob& job, DeviceStream stream, double& blocked_ms) {
  const auto is_readable = [](ChunkRef) { return true; };
  if constexpr (requires { store.take_loaded(); }) {
    blocked_ms = host_ms([&] { store.load({job}, is_readable, stream); });
    std::vector<LoadOutcome> outcomes;
    while (outcomes.empty()) {
      std::this_thread::sleep_for(std::chrono::microseconds(20));
      for (auto& loaded : store.take_loaded()) outcomes.push_back(std::move(loaded.outcome));
    }
    return outcomes;
  } else {
    std::vector<LoadOutcome> outcomes;
    blocked_ms = host_ms([&] { outcomes = store.load({job}, is_readable, stream); });
    return outcomes;
  }
}

class StoreBench {
 public:
  StoreBench(const Gpu& gpu, Transport& transport, std::uint32_t num_frames, std::uint32_t num_slots)
      : device_(*gpu.device),
        cache_(device_, 2 * kTokens / PatternCache::kBlockTokens),
        pool_(must(SharedMemory::create("gpu_store_bench", num_slots * kChunkBytes))),
        transport_(transport),
        region_(must(transport.register_region(pool_.region()))) {
    ChunkStoreParts parts{{cache_.layout()}, 0, pool_.span(), kChunkBytes, region_};
    store_ = must(make_gpu_store(std::move(parts), {.gpu = gpu,
                                                    .bytes = num_frames * kChunkBytes,
                                                    .is_landing_place = false,
                                                    .clock = clock_,
                                                    .transport = transport_}));
    stream_ = static_cast<cudaStream_t>(must(device_.make_stream()));
    cache_.write(saved_, kTokens, kSeed);
  }
  ~StoreBench() {
    store_.reset();
    must(transport_.unregister_region(region_));
    device_.drop_stream(stream_);
  }
  StoreBench(const StoreBench&) = delete;
  StoreBench& operator=(const StoreBench&) = delete;

  /// Saves all tokens into slots [first, first + kChunks).
  Times save(std::uint32_t first, int step_launches) {
    SaveJob job{"saved", {saved_}, {}};
    ++generation_;
    for (std::uint32_t i = 0; i < kChunks; ++i)
      job.items.push_back({{first + i, generation_}, i * kChunkTokens, kChunkTokens});
    Times times;
    std::vector<SaveDone> done;
    times.done = run(
        step_launches, times.stream, [&] { times.blocked = host_ms([&] { store_->save({job}, stream_); }); },
        [&] {
          for (const SaveDone& one : store_->take_saved())
            if (!one.is_in_frame) done.push_back(one);
          return done.size() == kChunks;
        });
    checksums_.assign(kChunks, 0);
    for (const SaveDone& one : done) {
      KVFERRY_CHECK(one.ok, "a save failed");
      checksums_[one.chunk.slot - first] = one.checksum;
    }
    first_ = first;
    return times;
  }
  /// Returns how many chunks' checksums are not those of the bytes in their slots.
  std::uint32_t count_wrong_slots() const {
    std::uint32_t wrong = 0;
    for (std::uint32_t i = 0; i < kChunks; ++i)
      wrong += chunk_checksum(pool_.span().subspan((first_ + i) * kChunkBytes, kChunkBytes)) != checksums_[i] ? 1U : 0U;
    return wrong;
  }

  /// The chunks of a save, for a later load().
  LoadJob saved_job() const {
    LoadJob job{"loaded", 0, {loaded_}, {}};
    for (std::uint32_t i = 0; i < kChunks; ++i)
      job.items.push_back(
          {{first_ + i, generation_}, {checksums_[i]}, kChunkTokens, 0, i * kChunkTokens, kChunkTokens});
    return job;
  }
  Times load(const LoadJob& job, int step_launches) {
    Times times;
    std::vector<LoadOutcome> outcomes;
    times.done = run(
        step_launches, times.stream, [&] { outcomes = load_all(*store_, job, stream_, times.blocked); },
        [] { return true; });
    KVFERRY_CHECK(outcomes.size() == 1 && outcomes[0].tokens_loaded == kTokens, "a load failed");
    return times;
  }
  std::uint32_t count_wrong_tokens() const { return cache_.count_wrong(loaded_, kTokens, kSeed); }
  void wipe_loaded() { cache_.write(saved_, kTokens, kSeed); }

 private:
  static constexpr std::uint64_t kSeed = 7;

  /// Enqueues a step's kernel, runs `call`, and then waits until the stream has ended and `is_done` returns true.
  /// Returns the milliseconds of all that after the kernel was enqueued.
  template <class Call, class IsDone>
  double run(int step_launches, double& stream_ms, Call call, IsDone is_done) {
    must(cudaDeviceSynchronize());
    if (step_launches > 0) must(launch_compute_rival(step_launches, stream_));
    return host_ms([&] {
      stream_ms = host_ms([&] {
        call();
        must(cudaStreamSynchronize(stream_));
      });
      while (!is_done()) std::this_thread::sleep_for(std::chrono::microseconds(20));
    });
  }

  SteadyClock clock_;
  Device& device_;
  PatternCache cache_;
  SharedMemory pool_;
  Transport& transport_;
  RegionId region_;
  cudaStream_t stream_ = nullptr;
  std::unique_ptr<ChunkStore> store_;
  static constexpr BlockId kBlocks = kTokens / PatternCache::kBlockTokens;
  const std::vector<BlockId> saved_ = shuffled(0, kBlocks, 1), loaded_ = shuffled(kBlocks, 2 * kBlocks, 2);
  std::vector<std::uint64_t> checksums_;
  std::uint32_t first_ = 0;
  std::uint64_t generation_ = 0;
};

struct Case {
  const char* name;
  std::uint32_t num_frames, num_slots;
  bool evicts_frames;  // the chunks' frames are given to others before the load
};

/// Returns the number of bytes, slots and tokens that were wrong.
std::uint32_t bench(const Gpu& gpu, Transport& transport, const Case& what, int step_launches) {
  StoreBench store(gpu, transport, what.num_frames, what.num_slots);
  std::uint32_t wrong = 0;
  for (const int launches : {0, step_launches}) {
    std::vector<Times> saves, loads;
    store.wipe_loaded();
    for (int round = -1; round < kRounds; ++round) {
      const Times saved = store.save(0, launches);
      const LoadJob job = store.saved_job();
      if (what.evicts_frames) store.save(kChunks, 0);
      const Times loaded = store.load(job, launches);
      if (round < 0) continue;  // warms up
      saves.push_back(saved);
      loads.push_back(loaded);
    }
    const std::uint32_t slots = store.count_wrong_slots(), tokens = store.count_wrong_tokens();
    wrong += slots + tokens;
    fmt::print("{:<34} {:<12}", what.name, launches == 0 ? "idle" : "step of 10 ms");
    for (const std::vector<Times>& times : {saves, loads}) {
      for (double Times::*const part : {&Times::blocked, &Times::stream, &Times::done}) {
        std::vector<double> values;
        for (const Times& one : times) values.push_back(one.*part);
        fmt::print(" {:>8.3f}", median(values));
      }
      fmt::print("  ");
    }
    fmt::print("{}\n", slots + tokens == 0 ? "yes" : fmt::format("NO: {} chunks, {} tokens", slots, tokens));
    std::fflush(stdout);
  }
  return wrong;
}

/// Prints how long copies of the same bytes take, and returns how many launches of the rival take kStepMs.
int measure_limits(Device& device) {
  auto* const stream = static_cast<cudaStream_t>(must(device.make_stream()));
  std::byte *const here = must(device.allocate(MemoryKind::kPinned, kBytes)),
                   *const there = must(device.allocate(MemoryKind::kDevice, kBytes)),
                   *const other = must(device.allocate(MemoryKind::kDevice, kBytes));
  const auto copy_ms = [&](std::byte* to, const std::byte* from) {
    std::vector<double> ms;
    for (int round = 0; round < kRounds; ++round)
      ms.push_back(device_ms(stream, 1, [&] { must(cudaMemcpyAsync(to, from, kBytes, cudaMemcpyDefault, stream)); }));
    return median(ms);
  };
  fmt::print("limits, ms for 1 GiB: within the GPU {:.3f}, down {:.3f}, up {:.3f}\n", copy_ms(other, there),
             copy_ms(here, there), copy_ms(there, here));
  const auto launch_ms = [&] { return device_ms(stream, 16, [&] { must(launch_compute_rival(1, stream)); }); };
  launch_ms();
  const double ms = launch_ms();
  for (std::byte* const memory : {there, other}) device.release(MemoryKind::kDevice, memory);
  device.release(MemoryKind::kPinned, here);
  device.drop_stream(stream);
  return std::max(1, static_cast<int>(kStepMs / ms));
}

}  // namespace
}  // namespace kvferry

int main() {
  using namespace kvferry;
  if (const std::string why = why_no_gpu(); !why.empty()) {
    fmt::print(stderr, "gpu_store_bench: needs a GPU: {}\n", why);
    return 77;
  }
  const Gpu gpu = must(open_gpu(0));
  fmt::print("{}, {} tokens of Llama-3.1-8B (1 GiB) in chunks of {}, ms\n", gpu.device->describe(), kTokens,
             kChunkTokens);
  const int step_launches = measure_limits(*gpu.device);
  const std::unique_ptr<Transport> transport = must(make_shm_transport({}));
  fmt::print("{:<47} {:>26}   {:>26}\n{:<47} {:>8} {:>8} {:>8}   {:>8} {:>8} {:>8}   right\n", "", "save", "load", "",
             "blocked", "stream", "done", "blocked", "stream", "done");
  std::uint32_t wrong = 0;
  for (const Case& what : {Case{"without frames", 0, kChunks, false}, Case{"chunks in frames", kChunks, kChunks, false},
                           Case{"chunks in slots, with frames", kChunks, 2 * kChunks, true}})
    wrong += bench(gpu, *transport, what, step_launches);
  transport->shutdown();
  return wrong == 0 ? 0 : 1;
}
