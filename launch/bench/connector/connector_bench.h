// `kvferry bench connector`: the time that vLLM's scheduler spends in the connector's calls.
#pragma once

#include <string>

#include "transport/base/result.h"

namespace kvferry::bench {

/// Values of the command-line flags, as the user typed them.
struct ConnectorFlags {
  std::string tokens = "4096";
  std::string running = "256";
  std::string repeat = "500";
  std::string peers{};
  std::string python{};
  std::string json_file{};
};

/// Prints progress on stderr and a table on stdout; writes the JSON file that the flags name. A Python without vLLM, or
/// a KV connector named in `peers` that can't be loaded, only causes a warning. Errors: kInvalidArgument if a flag has
/// an invalid value; kUnavailable if the file can't be written; kCancelled.
Result<void> run_connector_bench(const ConnectorFlags& flags);

}  // namespace kvferry::bench
