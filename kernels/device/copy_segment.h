// Bodies of the copy kernels: four threads, called lanes, copy one segment of a job's run.
//
// A lane copies 16 bytes of every 64-byte stripe, the bytes that it also hashes (segment_hash.h); four lanes read and
// write 64 contiguous bytes. Sizes and addresses of rows must be multiples of 16, as in all of vLLM's GPU layouts.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/device/row_cursor.h"
#include "kernels/device/segment_hash.h"
#include "kernels/device/vec_format.h"

namespace kvferry::device {

constexpr std::uint32_t kSegment = kSegmentStripes * kStripeBytes;
constexpr std::uint32_t kBatch = 8;  // stripes read at a time: enough to hide the latency of memory

KVFERRY_DEVICE Vec16 load(const std::byte* from) { return *reinterpret_cast<const Vec16*>(from); }
KVFERRY_DEVICE void store(std::byte* to, const Vec16& value) { *reinterpret_cast<Vec16*>(to) = value; }

/// A lane's part of its segment's hash.
struct LanePart {
  std::uint64_t part = 0;  // the sum of the four lanes' parts is the argument of SegmentLane::finish()
  bool is_whole = false;   // true: the segment ends in these layers, so the sum of the parts gives its whole hash
};

/// Returns how many of a segment's stripes have this lane's 16 bytes before byte `end`; in the first stripe this lane's
/// bytes begin at byte `first`.
KVFERRY_DEVICE std::uint32_t stripes_before(std::uint64_t end, std::uint64_t first) {
  if (end <= first) return 0;
  const std::uint64_t count = (end - first + kStripeBytes - 1) / kStripeBytes;
  return count < kSegmentStripes ? static_cast<std::uint32_t>(count) : kSegmentStripes;
}

/// Gathers the bytes of segment `segment` that lie in `layers`. With kHashes, also hashes the whole segment once it
/// ends in these layers: bytes of earlier layers are read from the chunk, where an earlier launch on the same stream
/// has written them.
template <class Format, bool kHashes>
KVFERRY_DEVICE LanePart gather_segment(const PackPlan& plan, const PackJob& job, const LayerRange& layers,
                                       const SegmentSecret& secret, std::uint64_t segment, std::uint32_t lane) {
  const std::uint64_t layer_bytes = plan.layer_bytes(job.num_tokens);
  const std::uint64_t end = layers.end * layer_bytes;
  const bool is_whole = (segment + 1) * kSegment <= end || layers.end == plan.num_layers;
  const std::uint64_t first = segment * kSegment + lane * kVecBytes;
  const std::uint32_t gathers_from = stripes_before(layers.first * layer_bytes, first);
  const std::uint32_t gathers_to = stripes_before(end, first);
  RowCursor cursor(plan, job, gathers_from < gathers_to ? first + gathers_from * kStripeBytes : 0);
  SegmentLane hash(lane);
  for (std::uint32_t stripe = 0; stripe < kSegmentStripes; stripe += kBatch) {
    Vec16 batch[kBatch];
    std::byte* to[kBatch];
    KVFERRY_UNROLL
    for (std::uint32_t i = 0; i < kBatch; ++i) {
      batch[i] = {};
      to[i] = nullptr;
      if (stripe + i < gathers_from) {
        if (kHashes && is_whole) batch[i] = load(job.chunk + first + (stripe + i) * kStripeBytes);
      } else if (stripe + i < gathers_to) {
        to[i] = cursor.in_chunk();
        if (const std::byte* const row = cursor.cache_row()) {
          Vec16 cached[Format::kCacheVecs];
          KVFERRY_UNROLL
          for (std::uint32_t v = 0; v < Format::kCacheVecs; ++v)
            cached[v] = load(row + cursor.column() * Format::kCacheVecs + v * kVecBytes);
          batch[i] = Format::to_chunk(cached, cursor.view().inverse_scale);
        }
        cursor.advance(kStripeBytes);
      }
    }
    KVFERRY_UNROLL
    for (std::uint32_t i = 0; i < kBatch; ++i) {
      if (to[i] != nullptr) store(to[i], batch[i]);
      if (kHashes) hash.add(secret, stripe + i, batch[i]);
    }
  }
  return {kHashes ? hash.part(secret) : 0, is_whole};
}

/// Scatters the bytes of segment `segment` of the run that lie in `layers`. With kHashes, also hashes the segment; that
/// requires that the run is the whole chunk and that `layers` are all layers; the part then belongs to the chunk's
/// segment.
template <class Format, bool kHashes>
KVFERRY_DEVICE LanePart scatter_segment(const PackPlan& plan, const PackJob& job, const LayerRange& layers,
                                        const SegmentSecret& secret, std::uint64_t segment, std::uint32_t lane) {
  const std::uint64_t layer_bytes = plan.layer_bytes(job.num_tokens);
  const std::uint64_t first = segment * kSegment + lane * kVecBytes;
  const std::uint32_t scatters_from = stripes_before(layers.first * layer_bytes, first);
  const std::uint32_t scatters_to = stripes_before(layers.end * layer_bytes, first);
  RowCursor cursor(plan, job, scatters_from < scatters_to ? first + scatters_from * kStripeBytes : 0);
  SegmentLane hash(lane);
  for (std::uint32_t stripe = 0; stripe < kSegmentStripes; stripe += kBatch) {
    Vec16 batch[kBatch];
    std::byte* to[kBatch];
    float scale[kBatch];
    KVFERRY_UNROLL
    for (std::uint32_t i = 0; i < kBatch; ++i) {
      batch[i] = {};
      to[i] = nullptr;
      scale[i] = 1;
      if (stripe + i < scatters_from || stripe + i >= scatters_to) continue;
      batch[i] = load(cursor.in_chunk());
      if (std::byte* const row = cursor.cache_row()) to[i] = row + cursor.column() * Format::kCacheVecs;
      scale[i] = cursor.view().scale;
      cursor.advance(kStripeBytes);
    }
    KVFERRY_UNROLL
    for (std::uint32_t i = 0; i < kBatch; ++i) {
      if (to[i] != nullptr) {
        Vec16 cached[Format::kCacheVecs];
        Format::to_cache(batch[i], scale[i], cached);
        KVFERRY_UNROLL
        for (std::uint32_t v = 0; v < Format::kCacheVecs; ++v) store(to[i] + v * kVecBytes, cached[v]);
      }
      if (kHashes) hash.add(secret, stripe + i, batch[i]);
    }
  }
  return {kHashes ? hash.part(secret) : 0, true};
}

}  // namespace kvferry::device
