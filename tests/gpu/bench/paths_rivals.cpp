// The sections of gpu_paths_bench about the cost of passes to others: to the host, and to a kernel that runs meanwhile.
#include <fmt/format.h>

#include <deque>
#include <functional>

#include "tests/gpu/bench/paths_bench.h"
#include "tests/gpu/bench/rival_kernels.h"

namespace kvferry {
namespace {

constexpr std::uint32_t kTokens = 4096;
constexpr double kRivalMs = 10;  // about as long as a step of a model
constexpr int kRounds = 5;

using PassPtr = std::unique_ptr<StreamPacker::Pass>;

/// Work that runs beside the rival. start() enqueues one piece on the bench's stream and may return a pass, which is
/// kept until the piece has ended.
struct Beside {
  const char* name;
  std::uint64_t bytes;
  std::function<PassPtr()> start;
};

struct Rival {
  const char* name;
  std::function<void(cudaStream_t stream)> launch;
};

struct Together {
  double rival_ms = 0;
  double gb_per_s = 0;  // of the work beside
};

/// Runs the rival once, while some pieces of the work beside it are under way all the time.
Together run_together(const PathsBench& bench, const Rival& rival, cudaStream_t rivals_stream, const Beside& beside) {
  constexpr std::size_t kPieces = 6;
  struct Piece {
    PassPtr pass;
    DeviceEvent end;
  };
  std::deque<Piece> pieces;
  std::uint64_t num_ended = 0;
  const auto start = [&] {
    PassPtr pass = beside.start();
    pieces.push_back({std::move(pass), must(DeviceEvent::record(*bench.device, bench.stream))});
  };
  const auto end = [&] {
    must(pieces.front().end.wait());
    pieces.pop_front();
    ++num_ended;
  };
  while (pieces.size() < kPieces) start();
  end();  // the first piece starts while the GPU is idle
  num_ended = 0;
  cudaEvent_t began = nullptr, ended = nullptr;
  must(cudaEventCreate(&began));
  must(cudaEventCreate(&ended));
  const double ms = host_ms([&] {
    must(cudaEventRecord(began, rivals_stream));
    rival.launch(rivals_stream);
    must(cudaEventRecord(ended, rivals_stream));
    while (cudaEventQuery(ended) == cudaErrorNotReady) {
      start();
      end();
    }
  });
  const Together together{device_ms_between(began, ended), gb_per_s(beside.bytes * num_ended, ms)};
  while (!pieces.empty()) end();
  must(cudaEventDestroy(began));
  must(cudaEventDestroy(ended));
  return together;
}

}  // namespace

void bench_host_time(const PathsBench& bench) {
  fmt::print(
      "\nhost us to start a pass of {} layers (gather() or scatter() to finish()); its limit is a launch alone\n"
      "{:<24} {:>8} {:>8} {:>8}\n",
      32, "", "gather", "scatter", "launch");
  for (const std::uint32_t tokens : {256U, 2048U, 8192U}) {
    const PackSetup setup(llama_8b(tokens / 16, kNhd), tokens);
    const BenchMemory chunks(*bench.device, MemoryKind::kDevice, setup.bytes());
    const std::vector<PackerJob> jobs = setup.jobs(chunks.data());
    std::vector<double> us[3];
    for (int round = -3; round < 40; ++round) {
      for (int what = 0; what < 3; ++what) {
        PassPtr pass;
        const double now = 1000 * host_ms([&] {
                             if (what == 2)
                               must(launch_nothing(bench.cuda_stream()));
                             else
                               pass = setup.start(jobs, what == 0, true, bench.stream);
                           });
        must(cudaStreamSynchronize(bench.cuda_stream()));
        if (round >= 0) us[what].push_back(now);
      }
    }
    fmt::print("{:<24} {:>8.1f} {:>8.1f} {:>8.1f}\n", fmt::format("{} chunks, {} blocks", tokens / 256, tokens / 16),
               median(us[0]), median(us[1]), median(us[2]));
  }
}

void bench_rivals(const PathsBench& bench) {
  Device& device = *bench.device;
  const PackSetup setup(llama_8b(kTokens / 16, kNhd), kTokens);
  const std::uint64_t bytes = setup.bytes();
  const BenchMemory frames(device, MemoryKind::kDevice, bytes), slots(device, MemoryKind::kPinned, bytes),
      rivals(device, MemoryKind::kDevice, bytes);
  const std::vector<PackerJob> in_frames = setup.jobs(frames.data());
  const std::vector<PackerJob> in_slots = setup.jobs(slots.data(), MemoryKind::kPinned);
  const auto stream = static_cast<cudaStream_t>(must(device.make_stream()));
  const auto copy = [&](std::byte* to, const std::byte* from) {
    must(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, bench.cuda_stream()));
    return PassPtr();
  };
  const Beside besides[] = {
      {"gather, chunks in GPU memory", bytes, [&] { return setup.start(in_frames, true, true, bench.stream); }},
      {"scatter, chunks in GPU memory", bytes, [&] { return setup.start(in_frames, false, true, bench.stream); }},
      {"gather, chunks in pinned memory", bytes, [&] { return setup.start(in_slots, true, true, bench.stream); }},
      {"scatter, chunks in pinned memory", bytes, [&] { return setup.start(in_slots, false, true, bench.stream); }},
      {"copy engine down", bytes, [&] { return copy(slots.data(), frames.data()); }},
      {"copy engine up", bytes, [&] { return copy(frames.data(), slots.data()); }}};

  const auto launches_of = [&](auto launch) {
    device_ms(stream, 1, [&] { must(launch(8)); });  // warms up
    return std::max(1, static_cast<int>(8 * kRivalMs / device_ms(stream, 1, [&] { must(launch(8)); })));
  };
  const int passes = launches_of([&](int n) { return launch_memory_rival(rivals.data(), bytes, n, stream); });
  const int loops = launches_of([&](int n) { return launch_compute_rival(n, stream); });
  const Rival both[] = {
      {"memory-bound kernels", [&](cudaStream_t on) { must(launch_memory_rival(rivals.data(), bytes, passes, on)); }},
      {"compute-bound kernels", [&](cudaStream_t on) { must(launch_compute_rival(loops, on)); }}};

  fmt::print(
      "\nother kernels beside passes and copies of 512 MiB: their ms alone and beside, and the GB/s of the other\n"
      "{:<34}",
      "");
  for (const Rival& rival : both) fmt::print(" {:>38}", rival.name);
  fmt::print("\n{:<34}", "");
  for (int i = 0; i < 2; ++i)
    fmt::print(" {:>7} {:>7} {:>7} {:>6} {:>7}", "alone", "beside", "slower", "GB/s", "of it");
  fmt::print("\n");
  for (const Beside& beside : besides) {
    std::vector<double> undisturbed;
    for (int round = 0; round < kRounds; ++round) {
      PassPtr kept;
      undisturbed.push_back(device_ms(bench.cuda_stream(), 1, [&] { kept = beside.start(); }));
    }
    fmt::print("{:<34}", beside.name);
    for (const Rival& rival : both) {
      std::vector<double> alone, ms, gb;
      for (int round = 0; round < kRounds; ++round) {
        alone.push_back(device_ms(stream, 1, [&] { rival.launch(stream); }));
        const Together together = run_together(bench, rival, stream, beside);
        ms.push_back(together.rival_ms);
        gb.push_back(together.gb_per_s);
      }
      fmt::print(" {:>7.2f} {:>7.2f} {:>5.0f} % {:>6.0f} {:>5.0f} %", median(alone), median(ms),
                 100 * (median(ms) / median(alone) - 1), median(gb),
                 100 * median(gb) / gb_per_s(bytes, median(undisturbed)));
    }
    fmt::print("\n");
  }
  device.drop_stream(stream);
}

}  // namespace kvferry
