// Bodies of the copy kernels: sixteen threads, called lanes, copy one segment of a job's run.
//
// A lane moves 16 bytes of the chunk at a time, the same ones that it hashes (segment_hash.h), so the lanes of a
// segment together access 256 contiguous bytes of the run (PackJob). Sizes and addresses of rows must be multiples of
// 16.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/device/row_cursor.h"
#include "kernels/device/segment_hash.h"
#include "kernels/device/vec_format.h"

namespace kvferry::device {

constexpr std::uint32_t kSegment = kSegmentStripes * kStripeBytes;
constexpr std::uint32_t kLaneStep = kSegmentLanes * kVecBytes;  // bytes between two accesses of a lane
constexpr std::uint32_t kLaneSteps = kSegment / kLaneStep;      // accesses of a lane in a segment
static_assert(kLaneSteps == kBlocks * kLaneStripes);

KVFERRY_DEVICE Vec16 load(const std::byte* from) { return *reinterpret_cast<const Vec16*>(from); }
KVFERRY_DEVICE void store(std::byte* to, const Vec16& value) { *reinterpret_cast<Vec16*>(to) = value; }

/// Returns how many of a lane's accesses begin before byte `end`; the first one begins at byte `first`.
KVFERRY_DEVICE std::uint32_t steps_before(std::uint64_t end, std::uint64_t first) {
  if (end <= first) return 0;
  const std::uint64_t count = (end - first + kLaneStep - 1) / kLaneStep;
  return count < kLaneSteps ? static_cast<std::uint32_t>(count) : kLaneSteps;
}

/// What both directions need: where the lane's bytes of segment `segment` of the run begin, and which of the lane's
/// accesses are in `layers`.
class LanePlace {
 public:
  KVFERRY_DEVICE LanePlace(const PackPlan& plan, const PackJob& job, const LayerRange& layers, std::uint64_t segment,
                           std::uint32_t lane)
      : first_(segment * kSegment + lane * kVecBytes),
        begin_(steps_before(layers.first * plan.layer_bytes(job.num_tokens), first_)),
        end_(steps_before(layers.end * plan.layer_bytes(job.num_tokens), first_)),
        cursor_(plan, job, begin_ < end_ ? first_ + begin_ * kLaneStep : 0),
        lane_(lane) {}

 protected:
  KVFERRY_DEVICE std::uint32_t quarter() const { return lane_ % kQuarters; }

  std::uint64_t first_;
  std::uint32_t begin_, end_;
  RowCursor cursor_;
  std::uint32_t lane_;
};

/// Gathers a lane's bytes of one segment that are in `layers`. With kHashes, and if the segment ends in these layers,
/// it also hashes all of the lane's bytes of the segment: bytes of earlier layers are read from the chunk, where an
/// earlier launch on the same stream has written them.
template <class Format, bool kHashes>
class GatherLane : LanePlace {
 public:
  KVFERRY_DEVICE GatherLane(const PackPlan& plan, const PackJob& job, const LayerRange& layers, std::uint64_t segment,
                            std::uint32_t lane)
      : LanePlace(plan, job, layers, segment, lane),
        chunk_(job.chunk + first_),
        is_whole_((segment + 1) * kSegment <= layers.end * plan.layer_bytes(job.num_tokens) ||
                  layers.end == plan.num_layers) {}

  /// Returns true if the segment ends in `layers`, so that its hash is complete.
  KVFERRY_DEVICE bool is_whole() const { return is_whole_; }

  /// Copies the lane's bytes of XXH3 block `block` of the segment. Must be called for all blocks in order.
  KVFERRY_DEVICE BlockSums copy_block(const SegmentSecret& secret, std::uint32_t block) {
    Vec16 batch[kLaneStripes];
    KVFERRY_UNROLL
    for (std::uint32_t i = 0; i < kLaneStripes; ++i) {
      const std::uint32_t step = block * kLaneStripes + i;
      batch[i] = {};
      if (step < begin_) {
        if (kHashes && is_whole_) batch[i] = load(chunk_ + step * kLaneStep);
      } else if (step < end_) {
        if (const std::byte* const row = cursor_.cache_row()) {
          Vec16 cached[Format::kCacheVecs];
          KVFERRY_UNROLL
          for (std::uint32_t v = 0; v < Format::kCacheVecs; ++v)
            cached[v] = load(row + cursor_.column() * Format::kCacheVecs + v * kVecBytes);
          batch[i] = Format::to_chunk(cached, cursor_.view().inverse_scale);
        }
        cursor_.advance(kLaneStep);
      }
    }
    BlockSums sums;
    KVFERRY_UNROLL
    for (std::uint32_t i = 0; i < kLaneStripes; ++i) {
      const std::uint32_t step = block * kLaneStripes + i;
      if (step >= begin_ && step < end_) store(chunk_ + step * kLaneStep, batch[i]);
      if (kHashes) sums.add(secret, quarter(), stripe_of(lane_, block, i), batch[i]);
    }
    return sums;
  }

 private:
  // Address of the lane's first byte of the segment. A gather copies the whole chunk, so a byte of the run has the same
  // position in the chunk.
  std::byte* chunk_;
  bool is_whole_;
};

/// Scatters a lane's bytes of one segment that are in `layers`. With kHashes, it also hashes them. The run must
/// then be the whole chunk, and `layers` all layers, so that the hash is that of the chunk's segment.
template <class Format, bool kHashes>
class ScatterLane : LanePlace {
 public:
  using LanePlace::LanePlace;

  KVFERRY_DEVICE bool is_whole() const { return true; }

  /// Copies the lane's bytes of XXH3 block `block` of the segment. Must be called for all blocks in order.
  KVFERRY_DEVICE BlockSums copy_block(const SegmentSecret& secret, std::uint32_t block) {
    Vec16 batch[kLaneStripes];
    std::byte* to[kLaneStripes];
    float scale[kLaneStripes];
    KVFERRY_UNROLL
    for (std::uint32_t i = 0; i < kLaneStripes; ++i) {
      const std::uint32_t step = block * kLaneStripes + i;
      batch[i] = {};
      to[i] = nullptr;
      scale[i] = 1;
      if (step < begin_ || step >= end_) continue;
      batch[i] = load(cursor_.in_chunk());
      if (std::byte* const row = cursor_.cache_row()) to[i] = row + cursor_.column() * Format::kCacheVecs;
      scale[i] = cursor_.view().scale;
      cursor_.advance(kLaneStep);
    }
    BlockSums sums;
    KVFERRY_UNROLL
    for (std::uint32_t i = 0; i < kLaneStripes; ++i) {
      if (to[i] != nullptr) {
        Vec16 cached[Format::kCacheVecs];
        Format::to_cache(batch[i], scale[i], cached);
        KVFERRY_UNROLL
        for (std::uint32_t v = 0; v < Format::kCacheVecs; ++v) store(to[i] + v * kVecBytes, cached[v]);
      }
      if (kHashes) sums.add(secret, quarter(), stripe_of(lane_, block, i), batch[i]);
    }
    return sums;
  }
};

}  // namespace kvferry::device
