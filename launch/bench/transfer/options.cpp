#include "launch/bench/transfer/options.h"

#include <algorithm>
#include <cstdio>
#include <fstream>

#include "launch/bench/harness/flags.h"
#include "launch/bench/transfer/model_shape.h"
#include "transport/make_transport.h"

namespace kvferry::bench {
namespace {

constexpr std::uint64_t kRequestBytes = 64 << 20;
constexpr std::uint64_t kBlockBytesMin = 64;
constexpr std::uint64_t kBlockBytesMax = 1 << 30;
constexpr std::uint64_t kBlocksMax = 1 << 24;
constexpr std::uint64_t kRepeatMax = 1000;
constexpr std::uint64_t kRanksMax = 1024;

constexpr std::string_view kMemories[] = {"kvferry", "foreign"};
constexpr std::string_view kOps[] = {"push", "pull"};
constexpr std::string_view kPeers[] = {"nixl", "mooncake", "ucx"};

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
                   fmt::format("{} blocks of {} bytes on both sides need {:.1f} GiB but this machine has {:.1f} GiB "
                               "free; lower --blocks, --block-bytes or --tokens",
                               shape.num_blocks, shape.block_bytes,
                               2.0 * static_cast<double>(shape.block_bytes * shape.num_blocks) / (1 << 30),
                               static_cast<double>(available_bytes) / (1 << 30))};
  }
  return {};
}

Result<void> model_shape(const TransferFlags& flags, std::uint64_t num_blocks, FlagReader& reader,
                         TransferOptions& options) {
  const Result<ModelShape> model = find_model(flags.model);
  if (!model) return model.error();
  const std::uint64_t tokens = reader.number("--tokens", flags.tokens, 1, kTokensMax);
  const std::uint64_t ranks = reader.number("--tp", flags.tp, 1, kRanksMax);
  if (!reader.result()) return {};
  Result<ModelBlocks> derived = blocks_of(*model, flags.dtype, tokens, ranks);
  if (!derived) return std::move(derived).error();
  options.shapes = {{derived->block_bytes, num_blocks != 0 ? num_blocks : derived->num_blocks}};
  options.derivation = std::move(derived->derivation);
  return {};
}

void parse_shapes(const TransferFlags& flags, FlagReader& reader, TransferOptions& options) {
  const std::uint64_t num_blocks = flags.blocks.empty() ? 0 : reader.number("--blocks", flags.blocks, 1, kBlocksMax);
  if (!flags.model.empty()) {
    if (Result<void> ok = model_shape(flags, num_blocks, reader, options); !ok) reader.fail(std::move(ok).error());
    return;
  }
  for (const std::string& word : split_list(flags.block_bytes)) {
    const Result<std::uint64_t> bytes = parse_byte_size(word);
    if (!bytes) return reader.fail({ErrorCode::kInvalidArgument, "--block-bytes: " + bytes.error().what});
    if (*bytes < kBlockBytesMin || *bytes > kBlockBytesMax || *bytes % 8 != 0)
      return reader.fail(bad_flag("--block-bytes", word, "multiples of 8 from 64 bytes to 1GiB"));
    options.shapes.push_back(
        {*bytes, num_blocks != 0 ? num_blocks : std::max<std::uint64_t>(1, kRequestBytes / *bytes)});
  }
}

std::optional<HostPort> parse_address(std::string_view flag, const std::string& value, FlagReader& reader) {
  if (value.empty()) return std::nullopt;
  Result<HostPort> address = net::parse_host_port(value);
  if (address) return std::move(*address);
  reader.fail(std::move(address).error().with(flag));
  return std::nullopt;
}

}  // namespace

Result<TransferOptions> parse_options(const TransferFlags& flags) {
  FlagReader reader;
  TransferOptions options;
  options.pin = flags.pin;
  options.json_file = flags.json_file;
  options.plot_file = flags.plot_file;
  options.paths = reader.words("--path", flags.path, path_names(false));
  for (const std::string& word : reader.words("--memory", flags.memory, kMemories))
    options.memories.push_back(word == "kvferry" ? MemoryKind::kKvferry : MemoryKind::kForeign);
  for (const std::string& word : reader.words("--op", flags.op, kOps)) options.pushes.push_back(word == "push");
  options.peers = reader.peers(flags.peers, kPeers);
  options.repeat = static_cast<int>(reader.number("--repeat", flags.repeat, 1, kRepeatMax));
  options.listen = parse_address("--listen", flags.listen, reader);
  options.connect = parse_address("--connect", flags.connect, reader);
  if (options.listen && options.connect)
    reader.fail(
        {ErrorCode::kInvalidArgument,
         "--listen and --connect exclude each other: one host listens, and the other one connects and measures"});
  reader.output_files(flags.json_file, flags.plot_file);
  parse_shapes(flags, reader, options);
  if (reader.result()) {
    if (Result<void> ok = check_memory(options.shapes); !ok) reader.fail(std::move(ok).error());
  }
  if (!reader.result()) return reader.result().error();
  return options;
}

}  // namespace kvferry::bench
