#include "launch/bench/transfer/pattern.h"

#include <cstring>
#include <numeric>
#include <utility>

#include "launch/bench/harness/scramble.h"

namespace kvferry::bench {
namespace {

constexpr std::uint64_t kGolden = 0x9e3779b97f4a7c15ULL;

}  // namespace

std::uint64_t pattern_word(std::uint64_t seed, Side side, std::uint64_t offset) {
  return scramble(offset + kGolden * (2 * seed + static_cast<std::uint64_t>(side) + 1));
}

void fill_pattern(std::span<std::byte> memory, std::uint64_t seed, Side side) {
  for (std::uint64_t offset = 0; offset + 8 <= memory.size(); offset += 8) {
    const std::uint64_t word = pattern_word(seed, side, offset);
    std::memcpy(memory.data() + offset, &word, 8);
  }
}

std::vector<std::uint64_t> block_offsets(const Job& job, Side side) {
  std::vector<std::uint64_t> offsets(job.num_blocks);
  for (std::uint64_t i = 0; i < job.num_blocks; ++i) offsets[i] = i * job.block_bytes;
  const std::uint64_t seed = kGolden * (2 * job.order_seed + static_cast<std::uint64_t>(side) + 1);
  for (std::uint64_t i = job.num_blocks; i > 1; --i) std::swap(offsets[i - 1], offsets[scramble(seed + i) % i]);
  return offsets;
}

bool holds_pattern(std::span<const std::byte> memory, const Job& job, std::uint64_t seed) {
  const Side source = job.source();
  const std::vector<std::uint64_t> from = block_offsets(job, source);
  const std::vector<std::uint64_t> to =
      block_offsets(job, source == Side::kInitiator ? Side::kTarget : Side::kInitiator);
  if (memory.size() < job.bytes()) return false;
  std::uint64_t wrong_bits = 0;
  for (std::uint64_t i = 0; i < job.num_blocks; ++i) {
    for (std::uint64_t at = 0; at < job.block_bytes; at += 8) {
      std::uint64_t word = 0;
      std::memcpy(&word, memory.data() + to[i] + at, 8);
      wrong_bits |= word ^ pattern_word(seed, source, from[i] + at);
    }
  }
  return wrong_bits == 0;
}

}  // namespace kvferry::bench
