// Tests how a transfer is cut into pieces, and the checksums of its ranges.
#include "transport/piece_cursor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "transport/range_verifier.h"

namespace kvferry {
namespace {

using ::testing::ElementsAre;

TEST(PieceCursor, CutsCopiesInOrderAndNeverAcrossOne) {
  std::vector<CopyRange> copies = {{0, 0, 10}, {0, 0, 0}, {0, 0, 5}};
  PieceCursor cursor;
  std::vector<std::tuple<std::size_t, std::uint64_t, std::uint64_t, bool>> pieces;
  while (!cursor.is_at_end(copies)) {
    const Piece piece = cursor.take(copies, 4);
    pieces.emplace_back(piece.copy, piece.at, piece.bytes, piece.ends_copy);
  }
  EXPECT_THAT(pieces, ElementsAre(std::tuple(0, 0, 4, false), std::tuple(0, 4, 4, false), std::tuple(0, 8, 2, true),
                                  std::tuple(1, 0, 0, true), std::tuple(2, 0, 4, false), std::tuple(2, 4, 1, true)));
  copies.push_back({0, 0, 0});
  copies.push_back({0, 0, 7});
  cursor.skip_empty_copies(copies);
  EXPECT_EQ(cursor.copy(), 4U) << "it goes on when more is fed";
  EXPECT_TRUE(cursor.take(copies, 7).ends_copy);
}

TEST(RangeVerifier, NamesTheCorruptRangesInOrder) {
  std::vector<std::byte> memory(100, std::byte{7});
  AcceptedTransfer transfer;
  transfer.local_base = memory.data();
  transfer.copies = {{0, 0, 40}, {40, 0, 0}, {50, 0, 50}};
  for (const CopyRange& copy : transfer.copies)
    transfer.checksums.push_back(chunk_checksum({memory.data() + copy.local_offset, copy.bytes}));
  RangeVerifier verifier(transfer);
  EXPECT_FALSE(verifier.has_arrived(2, 20));
  EXPECT_TRUE(verifier.has_arrived(2, 30));
  EXPECT_TRUE(verifier.has_arrived(1, 0));
  for (std::size_t range = 0; range < 3; ++range) verifier.compare_local(range);
  EXPECT_FALSE(verifier.has_corrupt());
  memory[99] ^= std::byte{1};
  verifier.compare_local(2);
  RangeDigest digest;
  EXPECT_FALSE(digest.add({memory.data(), 10}, false));
  verifier.compare(0, *digest.add({memory.data() + 10, 30}, true));
  EXPECT_THAT(verifier.corrupt_ranges(), ElementsAre(2));
  verifier.compare(0, *digest.add({memory.data(), 39}, true));
  EXPECT_THAT(verifier.corrupt_ranges(), ElementsAre(0, 2));
  EXPECT_EQ(verifier.what(), "the bytes of 2 of 3 ranges differ from their checksums");
}

}  // namespace
}  // namespace kvferry
