#include "launch/bench/transfer/options.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <span>
#include <string_view>

#include "launch/bench/harness/byte_size.h"
#include "launch/bench/transfer/model_shape.h"

namespace kvferry::bench {
namespace {

constexpr std::uint64_t kRequestBytes = 64 << 20;
constexpr std::uint64_t kBlockBytesMin = 64;
constexpr std::uint64_t kBlockBytesMax = 1 << 30;
constexpr std::uint64_t kBlocksMax = 1 << 24;
constexpr std::uint64_t kRepeatMax = 1000;

constexpr std::string_view kPaths[] = {"auto", "shm", "cma", "ucx", "tcp"};
constexpr std::string_view kMemories[] = {"kvferry", "foreign"};
constexpr std::string_view kOps[] = {"push", "pull"};
constexpr std::string_view kPeers[] = {"nixl", "mooncake", "ucx"};

Error bad(std::string_view flag, std::string_view value, std::string_view allowed) {
  return {ErrorCode::kInvalidArgument, fmt::format("{} is '{}'; allowed: {}", flag, value, allowed)};
}

/// Words between commas, each of the allowed ones and once.
Result<std::vector<std::string>> choose(std::string_view flag, std::string_view value,
                                        std::span<const std::string_view> allowed) {
  std::vector<std::string> words = split_list(value);
  for (auto word = words.begin(); word != words.end(); ++word) {
    if (std::find(allowed.begin(), allowed.end(), *word) == allowed.end() ||
        std::find(words.begin(), word, *word) != word)
      return bad(flag, value,
                 fmt::format("one or more of {}, each once, with commas between", fmt::join(allowed, ", ")));
  }
  return words;
}

Result<void> check_memory(const std::vector<Shape>& shapes) {
  std::ifstream meminfo("/proc/meminfo");
  std::uint64_t available_bytes = ~std::uint64_t{0};
  for (std::string line; std::getline(meminfo, line);) {
    unsigned long kib = 0;
    if (std::sscanf(line.c_str(), "MemAvailable: %lu", &kib) == 1) available_bytes = std::uint64_t{kib} << 10;
  }
  for (const Shape& shape : shapes) {
    if (2 * shape.block_bytes * shape.num_blocks > available_bytes)
      return Error{ErrorCode::kInvalidArgument,
                   fmt::format("{} blocks of {} bytes on both sides need {:.1f} GiB but this machine has {:.1f} free; "
                               "lower --blocks, --block-bytes or --tokens",
                               shape.num_blocks, shape.block_bytes,
                               2.0 * static_cast<double>(shape.block_bytes * shape.num_blocks) / (1 << 30),
                               static_cast<double>(available_bytes) / (1 << 30))};
  }
  return {};
}

Result<void> parse_shapes(const TransferFlags& flags, TransferOptions& options) {
  Result<std::uint64_t> blocks = std::uint64_t{0};
  if (!flags.blocks.empty()) blocks = parse_number("--blocks", flags.blocks, 1, kBlocksMax);
  if (!blocks) return std::move(blocks).error();
  if (!flags.model.empty()) {
    const Result<ModelShape> model = find_model(flags.model);
    if (!model) return model.error();
    const Result<std::uint64_t> tokens = parse_number("--tokens", flags.tokens, 1, 16 << 20);
    if (!tokens) return tokens.error();
    const Result<std::uint64_t> tp = parse_number("--tp", flags.tp, 1, 1024);
    if (!tp) return tp.error();
    Result<ModelBlocks> derived = blocks_of(*model, flags.dtype, *tokens, *tp);
    if (!derived) return std::move(derived).error();
    options.shapes = {{derived->block_bytes, *blocks != 0 ? *blocks : derived->num_blocks}};
    options.derivation = std::move(derived->derivation);
    return {};
  }
  for (const std::string& word : split_list(flags.block_bytes)) {
    const Result<std::uint64_t> bytes = parse_byte_size(word);
    if (!bytes) return Error{ErrorCode::kInvalidArgument, "--block-bytes: " + bytes.error().what};
    if (*bytes < kBlockBytesMin || *bytes > kBlockBytesMax || *bytes % 8 != 0)
      return bad("--block-bytes", word, "multiples of 8 from 64 bytes to 1GiB");
    options.shapes.push_back({*bytes, *blocks != 0 ? *blocks : std::max<std::uint64_t>(1, kRequestBytes / *bytes)});
  }
  return {};
}

Result<std::optional<HostPort>> parse_address(std::string_view flag, const std::string& value) {
  if (value.empty()) return std::optional<HostPort>();
  Result<HostPort> address = parse_host_port(value);
  if (!address) return std::move(address).error().with(flag);
  return std::optional<HostPort>(std::move(*address));
}

}  // namespace

Result<std::uint64_t> parse_number(std::string_view flag, std::string_view value, std::uint64_t least,
                                   std::uint64_t most) {
  std::uint64_t parsed = 0;
  const auto [end, failure] = std::from_chars(value.data(), value.data() + value.size(), parsed);
  if (failure != std::errc() || end != value.data() + value.size() || parsed < least || parsed > most)
    return bad(flag, value, fmt::format("{} to {}", least, most));
  return parsed;
}

Result<void> check_file(std::string_view flag, const std::string& file, std::string_view ending) {
  if (file.empty()) return {};
  if (!file.ends_with(ending)) return bad(flag, file, fmt::format("a file name that ends in {}", ending));
  std::error_code failure;
  const std::filesystem::path path(file);
  const std::filesystem::path folder = path.has_parent_path() ? path.parent_path() : ".";
  if (!std::filesystem::is_directory(folder, failure) || std::filesystem::is_directory(path, failure))
    return bad(flag, file, "a file in a folder that exists");
  return {};
}

Result<TransferOptions> parse_options(const TransferFlags& flags) {
  TransferOptions options;
  options.pin = flags.pin;
  options.json_file = flags.json_file;
  options.plot_file = flags.plot_file;
  Result<std::vector<std::string>> paths = choose("--path", flags.path, kPaths);
  if (!paths) return std::move(paths).error();
  options.paths = std::move(*paths);
  Result<std::vector<std::string>> memories = choose("--memory", flags.memory, kMemories);
  if (!memories) return std::move(memories).error();
  for (const std::string& word : *memories)
    options.memories.push_back(word == "kvferry" ? MemoryKind::kKvferry : MemoryKind::kForeign);
  Result<std::vector<std::string>> ops = choose("--op", flags.op, kOps);
  if (!ops) return std::move(ops).error();
  for (const std::string& word : *ops) options.pushes.push_back(word == "push");
  if (!flags.peers.empty()) {
    Result<std::vector<std::string>> peers = choose("--peers", flags.peers, kPeers);
    if (!peers) return std::move(peers).error();
    options.peers = std::move(*peers);
  }
  const Result<std::uint64_t> repeat = parse_number("--repeat", flags.repeat, 1, kRepeatMax);
  if (!repeat) return repeat.error();
  options.repeat = static_cast<int>(*repeat);
  Result<std::optional<HostPort>> listen = parse_address("--listen", flags.listen);
  if (!listen) return std::move(listen).error();
  options.listen = std::move(*listen);
  Result<std::optional<HostPort>> connect = parse_address("--connect", flags.connect);
  if (!connect) return std::move(connect).error();
  options.connect = std::move(*connect);
  if (options.listen && options.connect)
    return Error{ErrorCode::kInvalidArgument,
                 "--listen and --connect exclude each other: one host listens, one drives"};
  if (Result<void> ok = check_file("--json", flags.json_file, ""); !ok) return std::move(ok).error();
  if (Result<void> ok = check_file("--plot", flags.plot_file, ".png"); !ok) return std::move(ok).error();
  if (Result<void> ok = parse_shapes(flags, options); !ok) return std::move(ok).error();
  if (Result<void> ok = check_memory(options.shapes); !ok) return std::move(ok).error();
  return options;
}

}  // namespace kvferry::bench
