// The bytes of a transfer and the order of its blocks. Each side of a measurement computes both from a seed, and so do
// the Python peers (peers/bench_worker.py).
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace kvferry::bench {

enum class Side : std::uint8_t { kInitiator = 0, kTarget = 1 };

/// One request. Its i-th block is copied between the i-th offsets that block_offsets() returns for the two sides.
struct Job {
  bool is_push = true;
  std::uint64_t block_bytes = 0;  // size of a block; a multiple of 8
  std::uint64_t num_blocks = 0;
  std::uint64_t order_seed = 0;

  std::uint64_t bytes() const { return block_bytes * num_blocks; }
  Side source() const { return is_push ? Side::kInitiator : Side::kTarget; }
};

/// Returns the 64-bit word at `offset` (a multiple of 8) in the memory of `side` before the transfer.
std::uint64_t pattern_word(std::uint64_t seed, Side side, std::uint64_t offset);
void fill_pattern(std::span<std::byte> memory, std::uint64_t seed, Side side);

/// Returns the offsets of the blocks in a random order, which differs between the sides.
std::vector<std::uint64_t> block_offsets(const Job& job, Side side);

/// Returns true if the destination's `memory` holds the source's pattern in each block of the job.
bool holds_pattern(std::span<const std::byte> memory, const Job& job, std::uint64_t seed);

}  // namespace kvferry::bench
