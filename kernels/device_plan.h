// Translates a KvLayout and a ChunkFormat into the plan that the device code reads.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/chunk_shape.h"
#include "kernels/device/pack_plan.h"

namespace kvferry::device {

/// A plan whose `planes` points to this object's own list, until the caller has copied that list to the device.
struct HostPlan {
  std::vector<PlaneView> planes;
  PackPlan plan{};
};
HostPlan make_plan(const KvLayout& layout, const ChunkFormat& format, const ChunkShape& shape);

/// Returns true if each 16 bytes of a chunk are contiguous in the cache too, at addresses that are multiples of 16.
/// Only then copy_segment.h can be used; otherwise elements are copied one at a time.
bool is_vectorisable(const HostPlan& plan);

}  // namespace kvferry::device
