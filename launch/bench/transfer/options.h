// The flags of `kvferry bench transfer` as the user typed them, and the options that they stand for.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "launch/bench/transfer/engine.h"
#include "transport/base/net/host_port.h"

namespace kvferry::bench {

/// Values of the flags as the user typed them. Flags that are not given have the defaults below or are empty.
struct TransferFlags {
  std::string path = "auto";
  std::string memory = "kvferry,foreign";
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

using net::HostPort;

struct Shape {
  std::uint64_t block_bytes = 0;
  std::uint64_t num_blocks = 0;
};

struct TransferOptions {
  std::vector<std::string> paths;
  std::vector<MemoryKind> memories;
  std::vector<bool> pushes;  // the directions to measure; true: push, false: pull
  std::vector<Shape> shapes;
  std::string derivation;  // one line that shows how the shapes follow from --model; empty without --model
  int repeat = 5;
  std::vector<std::string> peers;
  std::string json_file;
  std::string plot_file;
  std::optional<HostPort> listen;
  std::optional<HostPort> connect;
  bool pin = true;
};

/// Checks the flags and converts them to options. Errors: kInvalidArgument, with a message that names the flags and
/// what is allowed.
Result<TransferOptions> parse_options(const TransferFlags& flags);

}  // namespace kvferry::bench
