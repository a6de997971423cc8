// What export_region() gives away: enough for a peer to check bounds before it posts, and for a backend to reach in.
#pragma once

#include <cstdint>
#include <string>

#include "transport/base/wire.h"

namespace kvferry {

struct RegionDescriptor {
  std::uint64_t incarnation = 0;  // of the transport that registered it; another incarnation's memory is never touched
  std::uint64_t base = 0;         // address in the owner's process
  std::uint64_t bytes = 0;
  std::string rkey;          // the backend's own, packed; may be empty
  std::uint32_t region = 0;  // the owner's RegionId
  std::uint32_t grant = 0;   // the owner's GrantId that base and bytes are the bounds of; 0: the whole region
  bool is_device = false;    // GPU memory, which no processor touches
  KVFERRY_FIELDS(incarnation, base, bytes, rkey, region, grant, is_device);
};

}  // namespace kvferry
