// Computes XXH3-64 of one checksum segment (transport/base/checksum.h) with four lanes, each of which hashes 16 bytes
// of every 64-byte stripe.
//
// Lane j holds accumulators 2j and 2j + 1, which XXH3 mixes only with each other; the lanes' results are added at the
// end. Constants and order are XXH3's (its specification: doc/xxhash_spec.md of xxHash 0.8) for 4096 bytes, no seed and
// the default secret.
#pragma once

#include <cstdint>

#include "kernels/device/portable.h"

namespace kvferry::device {

constexpr std::uint32_t kHashLanes = 4;
constexpr std::uint32_t kStripeBytes = 64;
constexpr std::uint32_t kSegmentStripes = 64;  // stripes in a segment; the last one has its own key
constexpr std::uint32_t kBlockStripes = 16;    // stripes between two scrambles of the accumulators

/// The words of XXH3's default secret that the steps of XXH3 read.
struct SegmentSecret {
  // Stripe s of an XXH3 block, which has kBlockStripes stripes, reads the eight words stripe[s] to stripe[s + 7].
  std::uint64_t stripe[kBlockStripes + 7];
  std::uint64_t last_stripe[8];
  std::uint64_t scramble[8];
  std::uint64_t merge[8];
};

/// Returns the secret's words, copied from libxxhash's headers.
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

  /// Hashes this lane's 16 bytes of stripe `stripe` of the segment. Must be called for all stripes in order.
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

  /// Returns this lane's part; the sum of all four parts is the argument of finish().
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
