#include "tests/kernels/emulated_launch.h"

#include <type_traits>
#include <vector>

#include "kernels/device/copy_range.h"
#include "kernels/device/copy_segment.h"
#include "kernels/element_formats.h"

namespace kvferry {
namespace {

using namespace device;

/// Runs the lanes of a segment and adds what they exchange, as launch.cu does. Returns the segment's hash.
template <class MakeLane>
std::uint64_t run_lanes(const SegmentSecret& secret, MakeLane make_lane) {
  std::vector<decltype(make_lane(0))> lanes;
  std::vector<SegmentQuarter> quarters;
  for (std::uint32_t lane = 0; lane < kSegmentLanes; ++lane) lanes.push_back(make_lane(lane));
  for (std::uint32_t quarter = 0; quarter < kQuarters; ++quarter) quarters.emplace_back(quarter);
  for (std::uint32_t block = 0; block < kBlocks; ++block) {
    BlockSums sums[kQuarters];
    for (std::uint32_t lane = 0; lane < kSegmentLanes; ++lane) {
      const BlockSums of_lane = lanes[lane].copy_block(secret, block);
      sums[lane % kQuarters].even += of_lane.even;
      sums[lane % kQuarters].odd += of_lane.odd;
    }
    for (std::uint32_t quarter = 0; quarter < kQuarters; ++quarter)
      quarters[quarter].end_block(secret, block, sums[quarter]);
  }
  std::uint64_t parts = 0;
  for (const SegmentQuarter& quarter : quarters) parts += quarter.part(secret);
  return SegmentQuarter::finish(parts);
}

template <class Format, bool kGathers, bool kHashes>
void copy_one(const EmulatedLaunch& launch, const PackJob& job, std::uint64_t segment) {
  using Lane = std::conditional_t<kGathers, GatherLane<Format, kHashes>, ScatterLane<Format, kHashes>>;
  const auto make_lane = [&](std::uint32_t lane) { return Lane(launch.plan, job, launch.layers, segment, lane); };
  const std::uint64_t hash = run_lanes(launch.secret, make_lane);
  if (kHashes && make_lane(0).is_whole()) job.segments[segment] = hash;
}

}  // namespace

void emulate_copy(const EmulatedLaunch& launch, const PackJob& job, bool gathers, bool hashes) {
  if (job.num_tokens == 0) return;
  const std::uint64_t layer_bytes = launch.plan.layer_bytes(job.num_tokens);
  const std::uint64_t end = (launch.layers.end * layer_bytes + kSegment - 1) / kSegment;
  with_format(launch.cache_type, launch.chunk_type, [&]<class Format, class Element>(Format, Element) {
    if constexpr (!std::is_same_v<Format, NoFormat>) {
      for (std::uint64_t segment = launch.layers.first * layer_bytes / kSegment; segment < end; ++segment) {
        if (gathers && hashes) copy_one<Format, true, true>(launch, job, segment);
        if (gathers && !hashes) copy_one<Format, true, false>(launch, job, segment);
        if (!gathers && hashes) copy_one<Format, false, true>(launch, job, segment);
        if (!gathers && !hashes) copy_one<Format, false, false>(launch, job, segment);
      }
    }
  });
}

void emulate_elements(const EmulatedLaunch& launch, const PackJob& job, bool gathers) {
  if (job.num_tokens == 0) return;
  const std::uint64_t layer_elements = launch.plan.layer_bytes(job.num_tokens) / launch.plan.chunk_element_bytes;
  with_format(launch.cache_type, launch.chunk_type, [&]<class Format, class Element>(Format, Element) {
    for (std::uint64_t i = launch.layers.first * layer_elements; i < launch.layers.end * layer_elements; ++i) {
      if (gathers)
        copy_element<Element, true>(launch.plan, job, i);
      else
        copy_element<Element, false>(launch.plan, job, i);
    }
  });
}

void emulate_hash(const SegmentSecret& secret, const std::byte* bytes, std::uint64_t num_bytes,
                  std::uint64_t* segments) {
  for (std::uint64_t segment = 0; segment * kSegment < num_bytes; ++segment) {
    segments[segment] =
        run_lanes(secret, [&](std::uint32_t lane) { return HashLane(bytes, num_bytes, segment, lane); });
  }
}

void emulate_ranges(std::byte* to, const std::byte* from, std::uint64_t num_bytes) {
  for (std::uint64_t first = 0; first < num_bytes; first += kTileBytes)
    for (std::uint32_t thread = 0; thread < kTileThreads; ++thread) copy_tile(to, from, num_bytes, first, thread);
}

}  // namespace kvferry
