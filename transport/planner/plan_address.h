// What the planner's addresses and descriptors are made of: one of each path. Private to this folder.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "transport/base/wire.h"

namespace kvferry::planner {

constexpr std::uint32_t kProtocolVersion = 1;

/// One path's own address or descriptor.
struct Part {
  std::string backend;  // as in backend_name()
  std::string bytes;
  KVFERRY_FIELDS(backend, bytes);
};
using Parts = std::vector<Part>;

struct RegionParts {
  bool is_shared = false;  // memory that peers on this host can map
  Parts parts;
  KVFERRY_FIELDS(is_shared, parts);
};

struct Address {
  std::uint32_t protocol_version = 0;
  Parts parts;
  RegionParts shared_probe;   // kProbeBytes that anybody may pull to measure
  RegionParts private_probe;  // the same in memory that can't be mapped
  KVFERRY_FIELDS(protocol_version, parts, shared_probe, private_probe);
};

constexpr std::uint64_t kProbeBytes = std::uint64_t{1} << 20;

inline const std::string* find_part(const Parts& parts, std::string_view backend) {
  for (const Part& part : parts) {
    if (part.backend == backend) return &part.bytes;
  }
  return nullptr;
}

}  // namespace kvferry::planner
