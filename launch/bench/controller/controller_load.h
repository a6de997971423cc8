// The load of `kvferry bench controller`: prefixes that workers hold, and look-ups of them.
//
// Hashes come in prefixes of 1024 keys. Each lies on one worker; every other one on a second worker as well, which
// makes 1.5 placements a hash. Workers tell of their prefixes in batches of 32 keys and take turns, as engines do. Keys
// are computed from (prefix, position), so that the load takes no memory of its own.
#pragma once

#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "controller/index/placement_index.h"

namespace kvferry::bench {

constexpr std::uint32_t kNumWorkers = 64;
constexpr std::uint64_t kPrefixKeys = 1024;
constexpr std::uint64_t kBatchKeys = 32;

constexpr std::uint64_t kControllerHashesMax = 100'000'000;

struct ControllerLoad {
  std::uint64_t num_hashes = 0;  // whole prefixes
  std::uint64_t repeat = 0;

  std::uint64_t num_prefixes() const { return num_hashes / kPrefixKeys; }
};

inline std::uint64_t scramble(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

template <class Key>
void fill_keys(std::uint64_t prefix, std::uint64_t position, std::span<Key> keys) {
  std::uint64_t number = prefix * kPrefixKeys + position + 1;
  for (Key& key : keys) {
    std::uint64_t words[2] = {scramble(number), scramble(~number)};
    std::memcpy(&key, words, sizeof(Key));
    ++number;
  }
}

inline controller::NodeIndex first_worker(std::uint64_t prefix) {
  return static_cast<std::uint32_t>(scramble(prefix)) % kNumWorkers;
}
inline bool has_second_worker(std::uint64_t prefix) { return prefix % 2 == 1; }
inline controller::NodeIndex second_worker(std::uint64_t prefix) {
  return (first_worker(prefix) + 1 + static_cast<std::uint32_t>(prefix / 2) % (kNumWorkers - 1)) % kNumWorkers;
}

/// Calls tell(worker, prefix, position) for each batch of prefixes [begin, end), 64 prefixes at a time in turns.
template <class Tell>
void for_each_batch(std::uint64_t begin, std::uint64_t end, const Tell& tell) {
  for (std::uint64_t some = begin; some < end; some += kNumWorkers) {
    const std::uint64_t some_end = some + kNumWorkers < end ? some + kNumWorkers : end;
    for (std::uint64_t position = 0; position < kPrefixKeys; position += kBatchKeys) {
      for (std::uint64_t prefix = some; prefix < some_end; ++prefix) {
        tell(first_worker(prefix), prefix, position);
        if (has_second_worker(prefix)) tell(second_worker(prefix), prefix, position);
      }
    }
  }
}

}  // namespace kvferry::bench
