// Conversions between KV element types, with the same bits on every device.
//
// fp8 is rounded to nearest even and saturates at its largest finite number; NaN is stored without a sign. CUDA's
// conversions with __NV_SATFINITE, which vLLM uses, do the same. An element x of the cache is stored in the chunk's
// type as x * inverse_scale, and an element y of the chunk in the cache's type as y * scale, rounded to nearest even.
#pragma once

#include <bit>
#include <cstdint>

#include "kernels/device/portable.h"

namespace kvferry::device {

KVFERRY_DEVICE std::uint32_t bits_of(float value) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(value);
#else
  return std::bit_cast<std::uint32_t>(value);
#endif
}
KVFERRY_DEVICE float float_of(std::uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  return std::bit_cast<float>(bits);
#endif
}

/// A float of fewer than 32 bits with a narrower exponent. kTooLarge replaces every magnitude above kLargest.
template <class StorageT, int kMantissaBits, int kBias, std::uint32_t kLargest, std::uint32_t kTooLarge,
          std::uint32_t kInfinity, std::uint32_t kNan>
struct SmallFloat {
  using Storage = StorageT;

  KVFERRY_DEVICE static Storage from_float(float value) {
    const std::uint32_t bits = bits_of(value), magnitude = bits & 0x7FFFFFFF;
    const std::uint32_t sign = bits >> 31 << kSignBit;
    // The code has no branches, so that compilers can vectorise it. `normal` is the magnitude without its lowest
    // kDropped bits, rounded to nearest even; a carry correctly runs into the exponent.
    constexpr int kDropped = 23 - kMantissaBits;
    // The biased exponent that a float of 32 bits has for the smallest normal number of this type.
    constexpr std::uint32_t kFirstNormal = 127 + 1 - kBias;
    const std::uint32_t normal = ((magnitude + (1U << (kDropped - 1)) - 1 + (magnitude >> kDropped & 1)) >> kDropped) -
                                 ((kFirstNormal - 1) << kMantissaBits);
    // Subnormal numbers are multiples of one quantum; this addition makes that quantum the weight of the float's last
    // bit.
    constexpr std::uint32_t kMagic = (kFirstNormal + 23 - kMantissaBits) << 23;
    const std::uint32_t subnormal = bits_of(float_of(magnitude) + float_of(kMagic)) - kMagic;
    const std::uint32_t rounded = magnitude >> 23 >= kFirstNormal ? normal : subnormal;
    const std::uint32_t finite = sign | (rounded > kLargest ? kTooLarge : rounded);
    return static_cast<Storage>(magnitude > 0x7F800000 ? kNan : finite);
  }

  /// Converts the small float to a float of 32 bits, without rounding.
  KVFERRY_DEVICE static float to_float(Storage stored) {
    const std::uint32_t magnitude = stored & ((1U << kSignBit) - 1);
    const std::uint32_t sign = static_cast<std::uint32_t>(stored >> kSignBit) << 31;
    // Moves the bits to their places in a float and corrects the exponent's bias by a multiplication, which is right
    // for subnormal numbers too.
    const float misplaced = float_of(sign | magnitude << (23 - kMantissaBits));
    const float finite = misplaced * float_of(static_cast<std::uint32_t>(127 + 127 - kBias) << 23);
    const std::uint32_t special = sign | (magnitude == kInfinity ? 0x7F800000U : 0x7FC00000U);
    return float_of(magnitude > kLargest ? special : bits_of(finite));
  }

 private:
  static constexpr int kSignBit = 8 * sizeof(Storage) - 1;
};
using E4m3 = SmallFloat<std::uint8_t, 3, 7, 0x7E, 0x7E, ~0U, 0x7F>;    // the largest value is 448; there is no infinity
using E5m2 = SmallFloat<std::uint8_t, 2, 15, 0x7B, 0x7B, 0x7C, 0x7F>;  // the largest finite value is 57344
using Fp16 = SmallFloat<std::uint16_t, 10, 15, 0x7BFF, 0x7C00, 0x7C00, 0x7FFF>;

struct Bf16 {
  using Storage = std::uint16_t;
  KVFERRY_DEVICE static Storage from_float(float value) {
    const std::uint32_t bits = bits_of(value);
    const std::uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    return static_cast<Storage>((bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FFF : rounded);
  }
  KVFERRY_DEVICE static float to_float(Storage stored) { return float_of(static_cast<std::uint32_t>(stored) << 16); }
};

struct Fp32 {
  using Storage = std::uint32_t;
  /// Processors differ in the NaN that a multiplication by the scale returns, so all NaNs are stored as the same one.
  KVFERRY_DEVICE static Storage from_float(float value) {
    const std::uint32_t bits = bits_of(value);
    return (bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FFFFFFF : bits;
  }
  KVFERRY_DEVICE static float to_float(Storage stored) { return float_of(stored); }
};

}  // namespace kvferry::device
