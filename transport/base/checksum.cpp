#include "transport/base/checksum.h"

#ifdef KVFERRY_XXHASH_DISPATCH
#include <xxh_x86dispatch.h>  // redefines the XXH3_ names as functions that select the instruction set at run time
#else
#include <xxhash.h>
#endif

#include <algorithm>
#include <array>
#include <bit>

#include "transport/base/check.h"

namespace kvferry {
namespace {

constexpr std::array<std::byte, kSegmentBytes> kZeros{};

void feed(XXH3_state_t* state, std::span<const std::byte> bytes) {
  KVFERRY_CHECK(XXH3_64bits_update(state, bytes.data(), bytes.size()) == XXH_OK,
                "the library xxHash failed to add {} bytes to a checksum", bytes.size());
}

void reset(XXH3_state_t* state) {
  KVFERRY_CHECK(XXH3_64bits_reset(state) == XXH_OK, "the library xxHash failed to begin a checksum");
}

}  // namespace

std::uint64_t segment_checksum(std::span<const std::byte, kSegmentBytes> segment) {
  return XXH3_64bits(segment.data(), kSegmentBytes);
}

std::uint64_t checksum_of_segments(std::span<const std::uint64_t> segments, std::uint64_t num_bytes) {
  static_assert(std::endian::native == std::endian::little);
  KVFERRY_CHECK(segments.size() == (num_bytes + kSegmentBytes - 1) / kSegmentBytes,
                "{} segment hashes were given for {} bytes, which have {} segments", segments.size(), num_bytes,
                (num_bytes + kSegmentBytes - 1) / kSegmentBytes);
  return XXH3_64bits_withSeed(segments.data(), segments.size_bytes(), num_bytes);
}

std::uint64_t chunk_checksum(std::span<const std::byte> bytes) {
  std::vector<std::uint64_t> segments;
  segments.reserve(bytes.size() / kSegmentBytes + 1);
  std::size_t at = 0;
  for (; at + kSegmentBytes <= bytes.size(); at += kSegmentBytes)
    segments.push_back(XXH3_64bits(bytes.data() + at, kSegmentBytes));
  if (at < bytes.size()) {
    std::array<std::byte, kSegmentBytes> last{};
    std::copy(bytes.begin() + static_cast<std::ptrdiff_t>(at), bytes.end(), last.begin());
    segments.push_back(XXH3_64bits(last.data(), kSegmentBytes));
  }
  return checksum_of_segments(segments, bytes.size());
}

ChecksumStream::ChecksumStream() : unfinished_(XXH3_createState()) {
  KVFERRY_CHECK(unfinished_ != nullptr, "the library xxHash has no memory for another checksum");
}

void ChecksumStream::update(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const std::size_t had = num_bytes_ % kSegmentBytes;
    const std::span<const std::byte> piece = bytes.first(std::min(bytes.size(), kSegmentBytes - had));
    if (piece.size() == kSegmentBytes) {
      segments_.push_back(XXH3_64bits(piece.data(), kSegmentBytes));
    } else {
      if (had == 0) reset(unfinished_.get());
      feed(unfinished_.get(), piece);
      if (had + piece.size() == kSegmentBytes) segments_.push_back(XXH3_64bits_digest(unfinished_.get()));
    }
    num_bytes_ += piece.size();
    bytes = bytes.subspan(piece.size());
  }
}

void ChecksumStream::update_hashed(std::span<const std::uint64_t> segments) {
  KVFERRY_CHECK(num_bytes_ % kSegmentBytes == 0,
                "hashes of segments were added to a checksum after {} bytes, which end "
                "within a segment",
                num_bytes_);
  segments_.insert(segments_.end(), segments.begin(), segments.end());
  num_bytes_ += segments.size() * kSegmentBytes;
}

void ChecksumStream::update_hashed(std::span<const std::byte> bytes, const ChecksumStream& hashed) {
  if (num_bytes_ % kSegmentBytes != 0) return update(bytes);
  update_hashed(hashed.segments_);
  update(bytes.subspan(hashed.segments_.size() * kSegmentBytes));
}

std::uint64_t ChecksumStream::digest() const {
  std::vector<std::uint64_t> segments = segments_;
  if (const std::size_t had = num_bytes_ % kSegmentBytes; had != 0) {
    const std::unique_ptr<XXH3_state_s, Free> last(XXH3_createState());
    KVFERRY_CHECK(last != nullptr, "the library xxHash has no memory for another checksum");
    XXH3_copyState(last.get(), unfinished_.get());
    feed(last.get(), std::span(kZeros).subspan(had));
    segments.push_back(XXH3_64bits_digest(last.get()));
  }
  return checksum_of_segments(segments, num_bytes_);
}

void ChecksumStream::Free::operator()(XXH3_state_s* state) const { XXH3_freeState(state); }

}  // namespace kvferry
