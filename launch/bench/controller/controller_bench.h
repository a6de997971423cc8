// `kvferry bench controller`: the controller's speed on one core, in this process and over its sockets.
#pragma once

#include <string>

#include "transport/base/result.h"

namespace kvferry::bench {

/// Values of the command-line flags, as the user typed them.
struct ControllerFlags {
  std::string hashes = "1000000";
  std::string repeat = "5";
  std::string json_file{};
  std::string plot_file{};
  std::string peers{};
};

/// Prints progress on stderr and a table on stdout; writes the JSON file and the picture that the flags name. Forks a
/// server process, so no other thread may be running. Errors: kInvalidArgument if a flag has an invalid value; kCorrupt
/// if the controller gave a wrong answer; kUnavailable, kPeerLost or kTimeout if a process can't be started or does not
/// answer; kUnavailable if the JSON file can't be written; kCancelled.
Result<void> run_controller_bench(const ControllerFlags& flags);

}  // namespace kvferry::bench
