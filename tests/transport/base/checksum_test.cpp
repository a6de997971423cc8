#include "transport/base/checksum.h"

#include <gtest/gtest.h>
#include <xxhash.h>

#include <algorithm>
#include <random>
#include <vector>

namespace kvferry {
namespace {

/// Computes the checksum as the header defines it, with the library's plain functions only.
std::uint64_t by_definition(std::span<const std::byte> bytes) {
  std::vector<std::uint64_t> segments;
  for (std::size_t at = 0; at < bytes.size(); at += kSegmentBytes) {
    std::vector<std::byte> segment(kSegmentBytes);
    std::copy_n(bytes.begin() + static_cast<std::ptrdiff_t>(at), std::min(kSegmentBytes, bytes.size() - at),
                segment.begin());
    segments.push_back(XXH3_64bits(segment.data(), segment.size()));
  }
  return XXH3_64bits_withSeed(segments.data(), segments.size() * sizeof segments[0], bytes.size());
}

TEST(ChunkChecksum, IsTheSameOnEveryNodeWhateverItsInstructionSet) {
  // The first value is XXH3's published value for no bytes. The others are fixed here, because peers compare checksums.
  EXPECT_EQ(chunk_checksum({}), 0x2d06800538d394c2u);
  std::vector<std::byte> bytes(10'000);
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i % 251);
  EXPECT_EQ(chunk_checksum(std::span(bytes).first(4096)), 0x22a0685951cfaad9u);
  EXPECT_EQ(chunk_checksum(bytes), 0xa628321d6bb54805u);
  for (const std::size_t size : {1, 64, 4095, 4096, 4097, 8192, 9999})
    EXPECT_EQ(chunk_checksum(std::span(bytes).first(size)), by_definition(std::span(bytes).first(size))) << size;
}

TEST(ChunkChecksum, TellsZerosThatFollowFromNone) {
  const std::vector<std::byte> zeros(3 * kSegmentBytes);
  EXPECT_NE(chunk_checksum(std::span(zeros).first(100)), chunk_checksum(std::span(zeros).first(101)));
  EXPECT_NE(chunk_checksum(std::span(zeros).first(4000)), chunk_checksum(std::span(zeros).first(4096)));
  EXPECT_NE(chunk_checksum(std::span(zeros).first(5000)), chunk_checksum(zeros));
}

TEST(ChunkChecksum, OfAStreamIsThatOfItsBytesHoweverCut) {
  std::mt19937 random(7);
  std::vector<std::byte> bytes(15'000);
  for (std::byte& b : bytes) b = static_cast<std::byte>(random());
  for (int cut = 0; cut < 200; ++cut) {
    ChecksumStream stream;
    const auto size = std::uniform_int_distribution<std::size_t>(0, bytes.size())(random);
    for (std::size_t done = 0; done < size;) {
      auto piece = std::min(size - done, std::uniform_int_distribution<std::size_t>(0, 6000)(random));
      if (random() % 3 == 0) piece -= std::min(piece, (done + piece) % kSegmentBytes);  // up to a segment's end
      const auto next = std::span(bytes).subspan(done, piece);
      if (ChecksumStream hashed; random() % 2 == 0) {
        hashed.update(next);
        stream.update_hashed(next, hashed);
      } else {
        stream.update(next);
      }
      done += piece;
    }
    ASSERT_EQ(stream.digest(), chunk_checksum(std::span(bytes).first(size))) << "cut " << cut;
  }
}

}  // namespace
}  // namespace kvferry
