// The finaliser of splitmix64: patterns, orders and keys that both sides of a measurement compute for themselves.
#pragma once

#include <cstdint>

namespace kvferry::bench {

inline std::uint64_t scramble(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

}  // namespace kvferry::bench
