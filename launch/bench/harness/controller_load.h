// The load of `kvferry bench controller`: prefixes that workers hold, and lookups of these prefixes. `bench fleet` uses
// the keys of this file too, and peers/controller_load.py is the same load in Python.
//
// Keys, which the figures call hashes, form prefixes of 1024 keys. Each prefix is held by one worker, and every second
// prefix also by a second worker, which makes 1.5 holders per key. Workers publish their prefixes in batches of 32
// keys, in turn, as engines do. Keys are computed from (prefix, position in the prefix), so that the load takes no
// memory of its own.
#pragma once

#include <cstdint>
#include <cstring>
#include <span>

#include "launch/bench/harness/scramble.h"

namespace kvferry::bench {

constexpr std::uint32_t kNumWorkers = 64;
constexpr std::uint64_t kPrefixKeys = 1024;
constexpr std::uint64_t kBatchKeys = 32;

constexpr std::uint64_t kControllerHashesMax = 100'000'000;

struct ControllerLoad {
  std::uint64_t num_hashes = 0;  // number of different keys; a multiple of kPrefixKeys
  std::uint64_t repeat = 0;

  std::uint64_t num_prefixes() const { return num_hashes / kPrefixKeys; }
};

template <class Key>
void fill_keys(std::uint64_t prefix, std::uint64_t position, std::span<Key> keys) {
  std::uint64_t number = prefix * kPrefixKeys + position + 1;
  for (Key& key : keys) {
    std::uint64_t words[2] = {scramble(number), scramble(~number)};
    std::memcpy(&key, words, sizeof(Key));
    ++number;
  }
}

inline std::uint32_t first_worker(std::uint64_t prefix) {
  return static_cast<std::uint32_t>(scramble(prefix)) % kNumWorkers;
}
inline bool has_second_worker(std::uint64_t prefix) { return prefix % 2 == 1; }
inline std::uint32_t second_worker(std::uint64_t prefix) {
  return (first_worker(prefix) + 1 + static_cast<std::uint32_t>(prefix / 2) % (kNumWorkers - 1)) % kNumWorkers;
}

/// Calls handle(worker, prefix, position of the first key) for each batch of the prefixes [begin, end) and each worker
/// that holds it. Takes 64 prefixes at a time: first the first batch of each prefix, then the second batch of each
/// prefix, and so on.
template <class Handle>
void for_each_batch(std::uint64_t begin, std::uint64_t end, const Handle& handle) {
  for (std::uint64_t some = begin; some < end; some += kNumWorkers) {
    const std::uint64_t some_end = some + kNumWorkers < end ? some + kNumWorkers : end;
    for (std::uint64_t position = 0; position < kPrefixKeys; position += kBatchKeys) {
      for (std::uint64_t prefix = some; prefix < some_end; ++prefix) {
        handle(first_worker(prefix), prefix, position);
        if (has_second_worker(prefix)) handle(second_worker(prefix), prefix, position);
      }
    }
  }
}

}  // namespace kvferry::bench
