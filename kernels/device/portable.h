// Macros that let one source be device code for nvcc and plain C++ for other compilers (host packer, tests).
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define KVFERRY_DEVICE __host__ __device__ __forceinline__
#else
#define KVFERRY_DEVICE inline __attribute__((always_inline))
#endif
#ifdef __CUDA_ARCH__
#define KVFERRY_UNROLL _Pragma("unroll")
#else
#define KVFERRY_UNROLL
#endif

namespace kvferry::device {

/// A vector of 16 bytes, which a thread loads and stores at once.
struct alignas(16) Vec16 {
  std::uint32_t word[4];
};
constexpr std::uint32_t kVecBytes = 16;

KVFERRY_DEVICE std::uint64_t low64(const Vec16& v) { return v.word[0] | std::uint64_t{v.word[1]} << 32; }
KVFERRY_DEVICE std::uint64_t high64(const Vec16& v) { return v.word[2] | std::uint64_t{v.word[3]} << 32; }

/// Returns the exclusive or of the upper and the lower 64 bits of a * b.
KVFERRY_DEVICE std::uint64_t multiply_fold(std::uint64_t a, std::uint64_t b) {
#ifdef __CUDA_ARCH__
  return (a * b) ^ __umul64hi(a, b);
#else
  __extension__ using Wide = unsigned __int128;
  const Wide product = static_cast<Wide>(a) * b;
  return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
#endif
}

}  // namespace kvferry::device
