// `kvferry bench fleet`: how many nodes a controller can serve, and what fails first.
#pragma once

#include <string>

#include "transport/base/result.h"

namespace kvferry::bench {

/// Values of the command-line flags, as the user typed them. Rates and chunks are per node.
struct FleetFlags {
  std::string nodes = "1000";
  std::string replicas = "1";
  std::string over = "zmq";
  std::string seconds = "5";
  std::string chunks = "2000";
  std::string stores = "5";
  std::string lookups = "2";
  std::string json_file{};
  std::string plot_file{};
};

/// Prints progress on stderr and a table on stdout; writes the JSON file and the picture that the flags name. A fleet
/// that overloads the controller is a result, not an error. Errors: kInvalidArgument if a flag has an invalid value, or
/// if the limit on open files is too low for that many nodes; kUnavailable if a node or a controller can't be started,
/// a controller does not answer, etcd or redis-server is missing, or the JSON file can't be written; kCancelled.
Result<void> run_fleet_bench(const FleetFlags& flags);

}  // namespace kvferry::bench
