// The checksum of chunks, of bytes that are all there or come in pieces.
//
// XXH3-64 of a long text is one chain of dependent steps. A GPU has a hundred thousand threads and each of them is
// slow, so the bytes are cut into segments that are hashed by themselves, in any order:
//
//     checksum = XXH3-64, seeded with the number of bytes, of the segments' XXH3-64 as little-endian u64, in order
//
// A last segment that is not full is hashed as if zeros followed; the seed tells it from one that ends in zeros.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

struct XXH3_state_s;  // libxxhash's

namespace kvferry {

constexpr std::size_t kSegmentBytes = 4096;

/// The same on every node, whatever instructions it has.
std::uint64_t chunk_checksum(std::span<const std::byte> bytes);

/// XXH3-64 of one whole segment.
std::uint64_t segment_checksum(std::span<const std::byte, kSegmentBytes> segment);

/// That of `num_bytes` bytes with these segments, ceil(num_bytes / kSegmentBytes) of them.
std::uint64_t checksum_of_segments(std::span<const std::uint64_t> segments, std::uint64_t num_bytes);

/// Fed while a piece is still in cache, so that hashing costs no second pass over memory. One thread at a time.
class ChecksumStream {
 public:
  ChecksumStream();
  void update(std::span<const std::byte> bytes);
  /// Of all bytes so far, in order.
  std::uint64_t digest() const;

 private:
  struct Free {
    void operator()(XXH3_state_s* state) const;
  };
  std::vector<std::uint64_t> segments_;  // the full ones
  std::uint64_t num_bytes_ = 0;
  std::unique_ptr<XXH3_state_s, Free> unfinished_;  // of the last segment, where it has come in part
};

}  // namespace kvferry
