// The data that a backend's export_region() and export_grant() encode. Peers use it to check bounds and to access the
// memory.
#pragma once

#include <cstdint>
#include <string>

#include "transport/base/wire.h"

namespace kvferry {

struct RegionDescriptor {
  std::uint64_t incarnation = 0;  // incarnation of the owner; memory of another incarnation is never accessed
  std::uint64_t base = 0;         // address in the owner's process
  std::uint64_t bytes = 0;
  std::string rkey;          // the backend's key to the region; may be empty
  std::uint32_t region = 0;  // the owner's RegionId
  std::uint64_t grant = 0;   // the owner's GrantId, if base and bytes are a grant's; 0: the whole region
  bool is_device = false;    // whether the region is GPU memory
  KVFERRY_FIELDS(incarnation, base, bytes, rkey, region, grant, is_device);
};

}  // namespace kvferry
