// `kvferry bench connector`: what vLLM's scheduler pays for the connector's calls.
#pragma once

#include <string>

#include "transport/base/result.h"

namespace kvferry::bench {

/// As typed.
struct ConnectorFlags {
  std::string tokens = "4096";
  std::string running = "256";
  std::string repeat = "500";
  std::string peers{};
  std::string python{};
  std::string json_file{};
};

/// Progress on stderr, a table on stdout, the JSON file where asked for. kInvalidArgument: a flag's value;
/// kUnavailable: the file can't be written. A Python without vLLM, or a peer that doesn't load, is a warning.
Result<void> run_connector_bench(const ConnectorFlags& flags);

}  // namespace kvferry::bench
