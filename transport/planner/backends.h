// The registry of backends, and the backends that a planner has opened. Private to this folder.
#pragma once

#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "transport/address_secret.h"
#include "transport/make_transport.h"
#include "transport/planner/plan_address.h"

namespace kvferry::planner {

using Backends = std::vector<struct OpenBackend>;

/// One way to move bytes. A new backend adds its value to Path and its row to the table in backends.cpp.
struct PathInfo {
  Path path;
  std::string_view name;      // name in settings and logs
  std::string_view backend;   // name in addresses and descriptors; the same for all paths of one backend
  std::uint32_t reaches = 0;  // memory classes that the path reaches, one bit_of() each
  bool needs_gpu = false;
  bool (*is_useful)(const TransportOptions& options) = nullptr;  // kAuto leaves the path out if this returns false
  Result<std::unique_ptr<Transport>> (*make)(const TransportOptions& options) = nullptr;
  TimeNs setup_ns = 0;  // extra time that the first transfer with a peer may take
  // Changes the secret in an address of the backend; null: the backend knows peers by their certificates.
  Result<std::string> (*change_secret)(const std::string& address, const SecretChange& change) = nullptr;

  bool reaches_class(MemoryClass kind) const { return (reaches & bit_of(kind)) != 0; }
  static constexpr std::uint32_t bit_of(MemoryClass kind) { return 1U << static_cast<unsigned>(kind); }
};
std::span<const PathInfo> all_paths();
const PathInfo& info_of(Path path);

struct OpenBackend {
  std::string_view name;  // PathInfo::backend
  std::unique_ptr<Transport> transport;
  bool moves_host_memory = true;
};

/// Opens the backends that options.path allows, in the order of preference that is used until the paths to a peer are
/// measured. kAuto leaves out, with a warning, backends that are unavailable on this machine. Errors: those of the
/// backends; kUnavailable if no backend is left.
Result<Backends> make_backends(const TransportOptions& options);

}  // namespace kvferry::planner
