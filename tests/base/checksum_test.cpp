#include "transport/base/checksum.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace kvferry {
namespace {

TEST(ChunkChecksum, IsXxh3OnEveryNodeWhateverItsInstructionSet) {
  // XXH3's published value for no bytes, and its scalar version's for bytes enough to need vectors: peers compare them.
  EXPECT_EQ(chunk_checksum({}), 0x2d06800538d394c2u);
  std::vector<std::byte> bytes(4096);
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i % 251);
  EXPECT_EQ(chunk_checksum(bytes), 0x7135ffa504f1bc71u);
}

TEST(ChunkChecksum, OfAStreamIsThatOfItsBytesHoweverCut) {
  std::mt19937 random(7);
  std::vector<std::byte> bytes(5000);
  for (std::byte& b : bytes) b = static_cast<std::byte>(random());
  for (int cut = 0; cut < 200; ++cut) {
    ChecksumStream stream;
    const auto size = std::uniform_int_distribution<std::size_t>(0, bytes.size())(random);
    for (std::size_t done = 0; done < size;) {
      const auto piece = std::min(size - done, std::uniform_int_distribution<std::size_t>(0, 1500)(random));
      stream.update(std::span(bytes).subspan(done, piece));
      done += piece;
    }
    ASSERT_EQ(stream.digest(), chunk_checksum(std::span(bytes).first(size))) << "cut " << cut;
  }
}

}  // namespace
}  // namespace kvferry
