// Translates a KvLayout and a ChunkFormat into the plan that the device code reads.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/chunk_shape.h"
#include "kernels/device/pack_plan.h"

namespace kvferry::device {

/// A plan in host memory: plan.planes points to `planes` of this object. Kernels need a copy of that list in GPU
/// memory.
struct HostPlan {
  std::vector<PlaneView> planes;
  PackPlan plan{};
  bool has_format = true;  // whether vec_format.h has a class for the types of cache and chunk
};
HostPlan make_plan(const KvLayout& layout, const ChunkFormat& format, const ChunkShape& shape);

/// Returns true if each 16 bytes of a chunk are contiguous in the cache too, at addresses that are multiples of 16, and
/// are copied unchanged or converted from or to fp8 in the chunk.
/// Only then can copy_segment.h be used; otherwise elements are copied one at a time.
bool is_vectorisable(const HostPlan& plan);

}  // namespace kvferry::device
