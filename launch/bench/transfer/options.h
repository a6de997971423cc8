// What `kvferry bench transfer` was asked for: the flags as words, and what they mean.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "launch/bench/transfer/engine.h"
#include "launch/bench/harness/tcp.h"

namespace kvferry::bench {

/// As typed; empty: not given.
struct TransferFlags {
  std::string path = "auto";
  std::string memory = "kvferry";
  std::string op = "push,pull";
  std::string block_bytes = "4KiB,16KiB,64KiB,256KiB,1MiB,4MiB";
  std::string blocks;
  std::string repeat = "5";
  std::string peers;
  std::string model;
  std::string dtype = "bf16";
  std::string tokens = "1024";
  std::string tp = "1";
  std::string json_file;
  std::string plot_file;
  std::string listen;
  std::string connect;
  bool pin = true;
};

struct Shape {
  std::uint64_t block_bytes = 0;
  std::uint64_t num_blocks = 0;
};

struct TransferOptions {
  std::vector<std::string> paths;
  std::vector<MemoryKind> memories;
  std::vector<bool> pushes;  // true: push
  std::vector<Shape> shapes;
  std::string derivation;  // of the shapes, where a model gave them
  int repeat = 5;
  std::vector<std::string> peers;
  std::string json_file;
  std::string plot_file;
  std::optional<HostPort> listen;
  std::optional<HostPort> connect;
  bool pin = true;
};

/// kInvalidArgument: names the flag, its value and what is allowed.
Result<TransferOptions> parse_options(const TransferFlags& flags);

/// For all benchmarks; the same errors. A file's name may be empty.
Result<std::uint64_t> parse_number(std::string_view flag, std::string_view value, std::uint64_t least,
                                   std::uint64_t most);
Result<void> check_file(std::string_view flag, const std::string& file, std::string_view ending);

}  // namespace kvferry::bench
