// The checksum of chunks, for bytes that are complete or arrive in pieces.
//
// XXH3-64 of a long input is one chain of dependent steps. A GPU has a hundred thousand threads and each of them is
// slow, so the bytes are cut into segments that are hashed independently, in any order:
//
//     checksum = XXH3-64, seeded with the number of bytes, of the segments' XXH3-64 as little-endian u64, in order
//
// A partial last segment is filled up with zeros. The seed makes the checksum differ from that of bytes that end in
// these zeros.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

struct XXH3_state_s;  // state of libxxhash

namespace kvferry {

constexpr std::size_t kSegmentBytes = 4096;

/// Returns a chunk's checksum, which does not depend on the node's instruction set.
std::uint64_t chunk_checksum(std::span<const std::byte> bytes);

/// Returns the XXH3-64 of one whole segment.
std::uint64_t segment_checksum(std::span<const std::byte, kSegmentBytes> segment);

/// Returns the checksum of `num_bytes` bytes from the hashes of their ceil(num_bytes / kSegmentBytes) segments.
std::uint64_t checksum_of_segments(std::span<const std::uint64_t> segments, std::uint64_t num_bytes);

/// Computes chunk_checksum() of bytes that are added in pieces, so that each piece can be hashed while it is in the
/// CPU's cache. Threads: one owner.
class ChecksumStream {
 public:
  ChecksumStream();
  void update(std::span<const std::byte> bytes);
  /// Adds whole segments by their hashes; the bytes so far must be whole segments too.
  void update_hashed(std::span<const std::uint64_t> segments);
  /// Same as update(bytes), where `hashed` is the stream of these bytes alone: hashes only what is no whole segment
  /// here.
  void update_hashed(std::span<const std::byte> bytes, const ChecksumStream& hashed);
  /// Returns the checksum of all bytes so far.
  std::uint64_t digest() const;

 private:
  struct Free {
    void operator()(XXH3_state_s* state) const;
  };
  std::vector<std::uint64_t> segments_;  // hashes of the full segments
  std::uint64_t num_bytes_ = 0;
  std::unique_ptr<XXH3_state_s, Free> unfinished_;  // hash state of the partial last segment
};

}  // namespace kvferry
