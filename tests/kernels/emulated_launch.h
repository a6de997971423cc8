// Runs the kernels of kernels/cuda/launch.h for one job on this processor, one lane after the other.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/device/pack_plan.h"
#include "kernels/device/segment_hash.h"
#include "kernels/element_type.h"

namespace kvferry {

struct EmulatedLaunch {
  const device::PackPlan& plan;
  device::LayerRange layers;
  ElementType cache_type, chunk_type;
  const device::SegmentSecret& secret;
};

/// Runs the copy by segments, which needs a layout that is_vectorisable() allows. `hashes`: writes hashes to
/// job.segments.
void emulate_copy(const EmulatedLaunch& launch, const device::PackJob& job, bool gathers, bool hashes);
void emulate_elements(const EmulatedLaunch& launch, const device::PackJob& job, bool gathers);
void emulate_hash(const device::SegmentSecret& secret, const std::byte* bytes, std::uint64_t num_bytes,
                  std::uint64_t* segments);
void emulate_ranges(std::byte* to, const std::byte* from, std::uint64_t num_bytes);

}  // namespace kvferry
