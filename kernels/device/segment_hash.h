// Computes XXH3-64 of one checksum segment (transport/base/checksum.h) with kSegmentLanes threads, called lanes. A lane
// hashes 16 bytes of every fourth 64-byte stripe.
//
// XXH3 mixes its eight accumulators only in pairs, which this file calls quarters: quarter j holds accumulators 2j and
// 2j + 1 and reads bytes 16j to 16j + 15 of each stripe. Between two scrambles a stripe only adds to the accumulators,
// so the four lanes of a quarter sum up different stripes, and their sums are added before the scramble. The results of
// the four quarters are added at the end. Constants and order are XXH3's (its specification: doc/xxhash_spec.md of
// xxHash 0.8) for 4096 bytes, no seed and the default secret.
#pragma once

#include <cstdint>

#include "kernels/device/portable.h"

namespace kvferry::device {

constexpr std::uint32_t kQuarters = 4;
constexpr std::uint32_t kSegmentLanes = 16;
constexpr std::uint32_t kStripeBytes = 64;
constexpr std::uint32_t kSegmentStripes = 64;  // number of stripes in a segment
constexpr std::uint32_t kBlockStripes = 16;    // number of stripes in an XXH3 block; a scramble separates blocks
constexpr std::uint32_t kBlocks = kSegmentStripes / kBlockStripes;
constexpr std::uint32_t kLaneStripes = kQuarters * kBlockStripes / kSegmentLanes;  // a lane's stripes in an XXH3 block

/// The words of XXH3's default secret that the steps of XXH3 read.
struct SegmentSecret {
  // Stripe s of an XXH3 block, which has kBlockStripes stripes, reads the eight words stripe[s] to stripe[s + 7]. Only
  // the segment's last stripe reads last_stripe instead.
  std::uint64_t stripe[kBlockStripes + 7];
  std::uint64_t last_stripe[8];
  std::uint64_t scramble[8];
  std::uint64_t merge[8];
};

/// Returns the secret's words, copied from libxxhash's headers.
SegmentSecret segment_secret();

/// Returns the stripe of the segment that lane `lane` hashes as its stripe number `index` of block `block`.
KVFERRY_DEVICE std::uint32_t stripe_of(std::uint32_t lane, std::uint32_t block, std::uint32_t index) {
  return block * kBlockStripes + index * (kSegmentLanes / kQuarters) + lane / kQuarters;
}

/// What stripes of one block add to the two accumulators of a quarter.
struct BlockSums {
  std::uint64_t even = 0, odd = 0;

  /// Adds `bytes`, the 16 bytes of quarter `quarter` in stripe `stripe` of the segment.
  KVFERRY_DEVICE void add(const SegmentSecret& secret, std::uint32_t quarter, std::uint32_t stripe,
                          const Vec16& bytes) {
    const bool is_last = stripe == kSegmentStripes - 1;
    const std::uint64_t* const key =
        (is_last ? secret.last_stripe : secret.stripe + stripe % kBlockStripes) + 2 * quarter;
    const std::uint64_t low = low64(bytes), high = high64(bytes);
    even += high + product(low ^ key[0]);
    odd += low + product(high ^ key[1]);
  }

 private:
  KVFERRY_DEVICE static std::uint64_t product(std::uint64_t keyed) { return (keyed & 0xFFFFFFFFU) * (keyed >> 32); }
};

/// The accumulators of one quarter. All lanes of the quarter may hold a copy.
class SegmentQuarter {
 public:
  KVFERRY_DEVICE explicit SegmentQuarter(std::uint32_t quarter) : quarter_(quarter) {
    constexpr std::uint64_t kPrime32[4] = {0, 0x9E3779B1U, 0x85EBCA77U, 0xC2B2AE3DU};
    constexpr std::uint64_t kPrime64[6] = {0,
                                           0x9E3779B185EBCA87ULL,
                                           0xC2B2AE3D27D4EB4FULL,
                                           0x165667B19E3779F9ULL,
                                           0x85EBCA77C2B2AE63ULL,
                                           0x27D4EB2F165667C5ULL};
    even_ = quarter == 0 ? kPrime32[3] : quarter == 1 ? kPrime64[2] : quarter == 2 ? kPrime64[4] : kPrime64[5];
    odd_ = quarter == 0 ? kPrime64[1] : quarter == 1 ? kPrime64[3] : quarter == 2 ? kPrime32[2] : kPrime32[1];
  }

  /// Adds the sums of all stripes of block `block`. Must be called for all blocks in order.
  KVFERRY_DEVICE void end_block(const SegmentSecret& secret, std::uint32_t block, const BlockSums& sums) {
    even_ += sums.even;
    odd_ += sums.odd;
    if (block == kBlocks - 1) return;
    even_ = scrambled(even_, secret.scramble[2 * quarter_]);
    odd_ = scrambled(odd_, secret.scramble[2 * quarter_ + 1]);
  }

  /// Returns this quarter's part; the sum of all four parts is the argument of finish().
  KVFERRY_DEVICE std::uint64_t part(const SegmentSecret& secret) const {
    return multiply_fold(even_ ^ secret.merge[2 * quarter_], odd_ ^ secret.merge[2 * quarter_ + 1]);
  }
  KVFERRY_DEVICE static std::uint64_t finish(std::uint64_t sum_of_parts) {
    std::uint64_t hash = sum_of_parts + std::uint64_t{kSegmentStripes * kStripeBytes} * 0x9E3779B185EBCA87ULL;
    hash ^= hash >> 37;
    hash *= 0x165667919E3779F9ULL;
    return hash ^ hash >> 32;
  }

 private:
  KVFERRY_DEVICE static std::uint64_t scrambled(std::uint64_t value, std::uint64_t key) {
    return (value ^ value >> 47 ^ key) * 0x9E3779B1U;
  }
  std::uint32_t quarter_;
  std::uint64_t even_, odd_;
};

}  // namespace kvferry::device
