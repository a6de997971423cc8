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

/// Returns true if copy_segment.h can be used for chunks at multiples of 16 bytes: the elements of a row are contiguous
/// in the cache, the sizes of rows and their addresses in the cache are multiples of 16 bytes, and elements are copied
/// unchanged or converted between a wider type in the cache and fp8 in the chunk. Otherwise elements are copied one at
/// a time (copy_elements.h).
bool is_vectorisable(const HostPlan& plan);

}  // namespace kvferry::device
