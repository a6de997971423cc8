// The transports that a planner can choose from. Private to this folder.
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "transport/make_transport.h"

namespace kvferry::planner {

struct Backend {
  std::string_view name;  // a path's, or "shm" for both paths of one host
  std::unique_ptr<Transport> transport;
  bool moves_host_memory = true;
};

/// Those that options.path allows, the one first that is tried first.
/// Errors: those of the backends; kAuto leaves out, with a warning, what this machine doesn't have.
Result<std::vector<Backend>> make_backends(const TransportOptions& options);

}  // namespace kvferry::planner
