// XXH3-64 of one checksum segment (transport/base/checksum.h) by four lanes, each with 16 bytes of every 64-byte
// stripe.
//
// Lane j keeps accumulators 2j and 2j + 1, which XXH3 mixes with each other alone: lanes meet once, at the end, in a
// sum. Constants and order are XXH3's (its specification: doc/xxhash_spec.md of xxHash 0.8) for 4096 bytes, no seed and
// the default secret.
#pragma once

#include <cstdint>

#include "kernels/device/portable.h"

namespace kvferry::device {

constexpr std::uint32_t kHashLanes = 4;
constexpr std::uint32_t kStripeBytes = 64;
constexpr std::uint32_t kSegmentStripes = 64;  // of a segment; the last one has a key of its own
constexpr std::uint32_t kBlockStripes = 16;    // between two scrambles

/// XXH3's default secret, as the words that its steps read.
struct SegmentSecret {
  std::uint64_t stripe[kBlockStripes + 7];  // stripe s of a block takes eight words from s on
  std::uint64_t last_stripe[8];
  std::uint64_t scramble[8];
  std::uint64_t merge[8];
};

/// From libxxhash's headers.
SegmentSecret segment_secret();

class SegmentLane {
 public:
  KVFERRY_DEVICE explicit SegmentLane(std::uint32_t lane) : lane_(lane) {
    constexpr std::uint64_t kPrime32[4] = {0, 0x9E3779B1U, 0x85EBCA77U, 0xC2B2AE3DU};
    constexpr std::uint64_t kPrime64[6] = {0,
                                           0x9E3779B185EBCA87ULL,
                                           0xC2B2AE3D27D4EB4FULL,
                                           0x165667B19E3779F9ULL,
                                           0x85EBCA77C2B2AE63ULL,
                                           0x27D4EB2F165667C5ULL};
    even_ = lane == 0 ? kPrime32[3] : lane == 1 ? kPrime64[2] : lane == 2 ? kPrime64[4] : kPrime64[5];
    odd_ = lane == 0 ? kPrime64[1] : lane == 1 ? kPrime64[3] : lane == 2 ? kPrime32[2] : kPrime32[1];
  }

  /// This lane's 16 bytes of stripe `stripe` of the segment; stripes in order.
  KVFERRY_DEVICE void add(const SegmentSecret& secret, std::uint32_t stripe, const Vec16& bytes) {
    const bool is_last = stripe == kSegmentStripes - 1;
    const std::uint64_t* const key =
        (is_last ? secret.last_stripe : secret.stripe + stripe % kBlockStripes) + 2 * lane_;
    const std::uint64_t even = low64(bytes), odd = high64(bytes);
    even_ += odd + product(even ^ key[0]);
    odd_ += even + product(odd ^ key[1]);
    if (stripe % kBlockStripes == kBlockStripes - 1 && !is_last) {
      even_ = scrambled(even_, secret.scramble[2 * lane_]);
      odd_ = scrambled(odd_, secret.scramble[2 * lane_ + 1]);
    }
  }

  /// The sum of all four lanes' parts goes to finish().
  KVFERRY_DEVICE std::uint64_t part(const SegmentSecret& secret) const {
    return multiply_fold(even_ ^ secret.merge[2 * lane_], odd_ ^ secret.merge[2 * lane_ + 1]);
  }
  KVFERRY_DEVICE static std::uint64_t finish(std::uint64_t sum_of_parts) {
    std::uint64_t hash = sum_of_parts + std::uint64_t{kSegmentStripes * kStripeBytes} * 0x9E3779B185EBCA87ULL;
    hash ^= hash >> 37;
    hash *= 0x165667919E3779F9ULL;
    return hash ^ hash >> 32;
  }

 private:
  KVFERRY_DEVICE static std::uint64_t product(std::uint64_t keyed) { return (keyed & 0xFFFFFFFFU) * (keyed >> 32); }
  KVFERRY_DEVICE static std::uint64_t scrambled(std::uint64_t value, std::uint64_t key) {
    return (value ^ value >> 47 ^ key) * 0x9E3779B1U;
  }
  std::uint32_t lane_;
  std::uint64_t even_, odd_;
};

}  // namespace kvferry::device
