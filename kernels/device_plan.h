// Translates a KvLayout and a ChunkFormat into the plan that the device code reads.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/chunk_shape.h"
#include "kernels/device/pack_plan.h"

namespace kvferry::device {

/// A plan whose `planes` points to this object's own list, until the list is somewhere the device can read it.
struct HostPlan {
  std::vector<PlaneView> planes;
  PackPlan plan{};
};
HostPlan make_plan(const KvLayout& layout, const ChunkFormat& format, const ChunkShape& shape);

/// Whether 16 bytes of a chunk are always side by side in the cache too, at addresses that are multiples of 16: what
/// copy_segment.h asks for. Otherwise elements are copied one at a time.
bool is_vectorisable(const HostPlan& plan);

}  // namespace kvferry::device
