#include "kernels/device_plan.h"

#include <algorithm>

namespace kvferry::device {

HostPlan make_plan(const KvLayout& layout, const ChunkFormat& format, const ChunkShape& shape) {
  HostPlan made;
  const auto add = [&](const LayerLayout& layer, const PlaneLayout& plane) {
    const float scale = format.scales.empty() ? 1 : format.scales[made.planes.size()];
    made.planes.push_back({plane.base, plane.block_stride_bytes, plane.head_stride_bytes, plane.token_stride_bytes,
                           plane.dim_stride_bytes, layer.group, scale, 1 / scale});
  };
  for (const LayerLayout& layer : layout.layers) {
    add(layer, layer.key);
    if (layout.planes == 2) add(layer, layer.value);
  }
  made.plan = {made.planes.data(),
               static_cast<std::uint32_t>(layout.layers.size()),
               layout.planes,
               layout.block_tokens,
               layout.head_dim,
               shape.num_heads,
               shape.first_in_cache,
               shape.first_in_chunk,
               shape.chunk_heads,
               layout.element_bytes,
               shape.chunk_element_bytes};
  made.has_format = !shape.converts || bytes_of(format.chunk_type) == 1;
  return made;
}

bool is_vectorisable(const HostPlan& made) {
  const PackPlan& plan = made.plan;
  const auto fits = [](auto value) { return value % kVecBytes == 0; };
  return made.has_format && fits(plan.row_bytes()) &&
         std::all_of(made.planes.begin(), made.planes.end(), [&](const PlaneView& plane) {
           const bool is_contiguous = plane.dim_stride_bytes == plan.cache_element_bytes || plan.head_dim == 1;
           return is_contiguous && fits(plane.base) && fits(plane.block_stride_bytes) &&
                  fits(plane.head_stride_bytes) && fits(plane.token_stride_bytes);
         });
}

}  // namespace kvferry::device
