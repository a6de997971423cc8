// The planner's addresses and descriptors, which have a part for each backend. Private to this folder.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "transport/base/wire.h"

namespace kvferry::planner {

constexpr std::uint32_t kProtocolVersion = 2;

/// Class of memory, which determines the paths that reach it and how fast they are.
enum class MemoryClass : std::uint8_t {
  kShared,  // shared memory, which peers on this host can map
  kOther,   // other host memory
  kDevice   // GPU memory
};
constexpr std::size_t kMemoryClasses = 3;

/// One backend's address or descriptor.
struct Part {
  std::string backend;  // PathInfo::backend
  std::string bytes;
  KVFERRY_FIELDS(backend, bytes);
};
using Parts = std::vector<Part>;

struct RegionParts {
  std::uint8_t kind = 0;  // value of a MemoryClass
  Parts parts;            // one for each backend that reaches the region
  MemoryClass memory_class() const {
    return kind < kMemoryClasses ? static_cast<MemoryClass>(kind) : MemoryClass::kOther;
  }
  KVFERRY_FIELDS(kind, parts);
};

struct Address {
  std::uint32_t protocol_version = 0;
  Parts parts;
  // Regions of kProbeBytes, one for each class of memory that this process can register. Peers pull them to measure the
  // paths.
  std::vector<RegionParts> probes;
  KVFERRY_FIELDS(protocol_version, parts, probes);
};

constexpr std::uint64_t kProbeBytes = std::uint64_t{1} << 20;

inline const std::string* find_part(const Parts& parts, std::string_view backend) {
  for (const Part& part : parts) {
    if (part.backend == backend) return &part.bytes;
  }
  return nullptr;
}

}  // namespace kvferry::planner
