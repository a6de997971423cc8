// The finaliser of splitmix64, with which all processes of a benchmark compute the same patterns, orders and keys.
#pragma once

#include <cstdint>

namespace kvferry::bench {

inline std::uint64_t scramble(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

}  // namespace kvferry::bench
