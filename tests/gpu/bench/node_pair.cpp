// Two nodes of kvferry in two processes on one GPU: one computes and saves 8192 tokens of Llama-3.1-8B (1 GiB), the
// other pulls and loads them into its own blocks, bit by bit the same. Prints how long that takes, over which path the
// bytes went, and which process uses how much memory of the GPU. In the last ways the prompt is pushed: its chunks are
// pulled as they are announced, before the request for it comes. The forward pass then takes LAYER_MS for each of the
// 32 layers; with push_layers, groups of layers are pulled meanwhile.
//
//   gpu_node_pair [TOKENS [LAYER_MS]]                              8192 and 10 unless given
//   gpu_node_pair --far CONTROLLER SETTINGS TOKENS                 the prefill node, which this program starts
#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>
#include <iostream>
#include <sstream>
#include <string_view>

#include "tests/gpu/bench/bench_node.h"
#include "tests/gpu/bench/bench_tools.h"
#include "tests/gpu/child_process.h"
#include "tests/gpu/device_cache.h"

namespace kvferry {
namespace {

constexpr int kRounds = 5, kWarmUps = 2;  // the first pulls wait for connections and for the measurement of paths

struct Way {
  const char* name;
  const char* settings;
  bool is_pushed = false;
};
constexpr Way kWays[] = {
    {"without frames", R"(, "gpu_pool_bytes": 0)"},
    {"frames, bytes by host slots", R"(, "gpu_pool_bytes": "1280MiB", "lands_in_gpu": false)"},
    {"frame to frame", R"(, "gpu_pool_bytes": "1280MiB", "lands_in_gpu": true)"},
    {"frame to frame, pushed", R"(, "gpu_pool_bytes": "1280MiB", "lands_in_gpu": true)", true},
    {"pushed by 8 groups of layers", R"(, "gpu_pool_bytes": "1280MiB", "push_layers": 8)", true},
};
constexpr const char* kPool = R"(, "pool_bytes": "2560MiB", "insecure": true)";

/// Serves lines of a prompt's number, and if it is pushed of the endpoint to which it is, and of the time for a layer,
/// with one line of what is needed to load it, until its input ends.
int run_far_side(const std::string& controller, const std::string& settings, std::uint32_t num_tokens) {
  Result<std::unique_ptr<BenchNode>> node = BenchNode::start(controller, "prefill", settings, num_tokens);
  if (!node) {
    std::cout << "failed " << node.error().what << std::endl;
    return 1;
  }
  std::cout << "ready" << std::endl;
  for (std::string line; std::getline(std::cin, line);) {
    std::uint64_t prompt = 0;
    std::string push_to;
    int layer_ms = 0;
    std::istringstream(line) >> prompt >> push_to >> layer_ms;
    const BenchNode::Prefilled done = (*node)->prefill(prompt, num_tokens, push_to, layer_ms);
    std::cout << fmt::format("{} {} {} {:.3f} {}", done.endpoint, done.handoff, done.num_tokens, done.saved_ms,
                             done.forward_ended)
              << std::endl;
  }
  return 0;
}

/// Prints what this GPU's processes and all of them together use, as nvidia-smi tells it.
void print_memory(int far_side) {
  std::size_t free_bytes = 0, all = 0;
  must(cudaMemGetInfo(&free_bytes, &all));
  fmt::print("  memory of the GPU in use: {:.0f} MiB; by process (decode {}, prefill {}):\n",
             static_cast<double>(all - free_bytes) / (1 << 20), ::getpid(), far_side);
  std::fflush(stdout);
  const int code = std::system(
      "nvidia-smi --query-compute-apps=pid,name,used_memory --format=csv,noheader | "
      "sed 's/^/    /'");
  if (code != 0) fmt::print("    nvidia-smi told nothing\n");
}

/// Returns the number of tokens that were wrong or were not loaded.
std::uint32_t bench(const Way& way, std::uint32_t num_tokens, int layer_ms) {
  const BenchController controller;
  const std::string settings = std::string(kPool) + way.settings;
  const auto child = must(
      ChildProcess::start("gpu_node_pair", {"--far", controller.endpoint(), settings, std::to_string(num_tokens)}));
  if (const std::string line = child->read_line(); line != "ready")
    return fmt::print("{:<28} the prefill node did not start: {}\n", way.name, line), num_tokens;
  Result<std::unique_ptr<BenchNode>> node = BenchNode::start(controller.endpoint(), "decode", settings, num_tokens);
  if (!node) return fmt::print("{:<28} did not start: {}\n", way.name, node.error().what), num_tokens;
  std::vector<double> total, lookup, load, post, wire, unpack, saved, pulled;
  std::uint32_t wrong = 0, in_frames = 0;
  const std::uint32_t num_chunks = num_tokens / BenchNode::kChunkTokens;
  LifeEvent last;
  for (int round = -kWarmUps; round < kRounds; ++round) {
    const auto prompt = static_cast<std::uint64_t>(round + kWarmUps + 1);
    child->write_line(way.is_pushed ? fmt::format("{} {} {}", prompt, (*node)->endpoint(), layer_ms)
                                    : std::to_string(prompt));
    if (way.is_pushed) in_frames = (*node)->wait_for_pulled(num_chunks);
    const TimeNs all_pulled = SteadyClock().now();
    BenchNode::Prefilled from;
    std::istringstream(child->read_line()) >> from.endpoint >> from.handoff >> from.num_tokens >> from.saved_ms >>
        from.forward_ended;
    if (from.endpoint.empty()) return fmt::print("{:<28} the prefill node has ended\n", way.name), num_tokens;
    const BenchNode::Loaded loaded = (*node)->load(prompt, num_tokens, from);
    wrong += loaded.num_wrong + (num_tokens - 1 - std::min(num_tokens - 1, loaded.num_tokens));
    if (round < 0) continue;
    total.push_back(loaded.total_ms);
    lookup.push_back(loaded.lookup_ms);
    load.push_back(loaded.load_ms);
    saved.push_back(from.saved_ms);
    pulled.push_back(static_cast<double>(all_pulled - from.forward_ended) / 1e6);
    post.push_back(static_cast<double>(loaded.pulled.post) / 1e6);
    wire.push_back(static_cast<double>(loaded.pulled.wire) / 1e6);
    unpack.push_back(static_cast<double>(loaded.pulled.unpack) / 1e6);
    last = loaded.pulled;
  }
  fmt::print("{:<28} {:>8.2f} {:>8.2f} {:>8.2f} {:>8.2f} {:>8.2f} {:>8.2f} {:>8.2f}   {:<8} {}\n", way.name,
             median(saved), median(total), median(lookup), median(post), median(wire), median(unpack), median(load),
             last.path.view().empty() ? "none" : last.path.view(), wrong == 0 ? "yes" : fmt::format("NO: {}", wrong));
  if (wrong > 0 && !last.note.view().empty()) fmt::print("  {}\n", last.note.view());
  if (way.is_pushed)
    fmt::print("  all chunks are there {:.2f} ms after the forward pass, {} of the last {} from frame to frame\n",
               median(pulled), in_frames, num_chunks);
  print_memory(child->pid());
  return wrong;
}

}  // namespace
}  // namespace kvferry

int main(int argc, char** argv) {
  using namespace kvferry;
  if (argc == 5 && std::string_view(argv[1]) == "--far") return run_far_side(argv[2], argv[3], std::stoul(argv[4]));
  if (const std::string why = why_no_gpu(); !why.empty()) {
    fmt::print(stderr, "gpu_node_pair: needs a GPU: {}\n", why);
    return 77;
  }
  const auto num_tokens = static_cast<std::uint32_t>(argc > 1 ? std::stoul(argv[1]) : 8192);
  fmt::print("{} tokens of Llama-3.1-8B from one process to another, ms, medians of {}\n", num_tokens, kRounds);
  fmt::print("{:<28} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8}   {:<8} {}\n", "", "saved", "handover", "lookup", "post",
             "wire", "unpack", "load", "path", "right");
  std::uint32_t wrong = 0;
  const int layer_ms = argc > 2 ? std::stoi(argv[2]) : 10;
  for (const Way& way : kWays) wrong += bench(way, num_tokens, layer_ms);
  return wrong == 0 ? 0 : 1;
}
