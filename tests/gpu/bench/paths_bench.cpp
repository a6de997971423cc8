// Measures every path that KV takes between the memory of a GPU and the memory of its host, each beside the machine's
// limit in the same run.
//
//   gpu_paths_bench [SECTION...]    all sections, or these
#include "tests/gpu/bench/paths_bench.h"

#include <fmt/format.h>

#include <string_view>

namespace {

struct Section {
  std::string_view name;
  void (*run)(const kvferry::PathsBench& bench);
};
constexpr Section kSections[] = {{"dma", kvferry::bench_dma},
                                 {"pinning", kvferry::bench_pinning},
                                 {"hash", kvferry::bench_hash},
                                 {"layouts", kvferry::bench_layouts},
                                 {"host", kvferry::bench_host_time},
                                 {"rivals", kvferry::bench_rivals},
                                 {"blocks", kvferry::bench_block_copies}};

}  // namespace

int main(int argc, char** argv) {
  using namespace kvferry;
  const std::vector<std::string_view> wanted(argv + 1, argv + argc);
  for (const std::string_view name : wanted) {
    const auto is_it = [&](const Section& section) { return section.name == name; };
    if (std::any_of(std::begin(kSections), std::end(kSections), is_it)) continue;
    fmt::print(stderr, "gpu_paths_bench: no section is called {}\n", name);
    return 2;
  }
  if (const std::string why = why_no_gpu(); !why.empty()) {
    fmt::print(stderr, "gpu_paths_bench: needs a GPU: {}\n", why);
    return 77;
  }
  const std::shared_ptr<Device> device = must(make_cuda_device(0));
  const PathsBench bench{device, must(device->make_stream())};
  fmt::print("{}, GB/s of chunk bytes, medians\n", device->describe());
  for (const Section& section : kSections) {
    if (!wanted.empty() && std::find(wanted.begin(), wanted.end(), section.name) == wanted.end()) continue;
    const double ms = host_ms([&] { section.run(bench); });
    fmt::print("({}: {:.1f} s)\n", section.name, ms / 1000);
    std::fflush(stdout);
  }
  device->drop_stream(bench.stream);
  return 0;
}
