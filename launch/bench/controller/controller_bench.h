// `kvferry bench controller`: what the controller does on one core, in this process and over its sockets.
#pragma once

#include <cstdint>
#include <string>

#include "transport/base/result.h"

namespace kvferry::bench {

/// As typed.
struct ControllerFlags {
  std::string hashes = "1000000";
  std::string repeat = "5";
  std::string json_file{};
  std::string plot_file{};
  std::string peers{};
};

/// Progress on stderr, a table on stdout, the JSON file and the picture where asked for. Starts a server as a process
/// of its own, so that no other thread may run. kInvalidArgument: a flag's value; kCorrupt: a look-up answered wrongly;
/// kUnavailable: the file can't be written.
Result<void> run_controller_bench(const ControllerFlags& flags);

}  // namespace kvferry::bench
