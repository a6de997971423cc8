// Tests loads that the host store unpacks while a peer still writes the chunk.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/connector/runtime/test_store.h"
#include "transport/base/checksum.h"

namespace kvferry {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

const ChunkRef kSent{2, 1};
const std::vector<BlockId> kLoadedInto = {4, 5};

class AheadLoads : public ::testing::Test {
 protected:
  AheadLoads() {
    for (const BlockId block : {3, 7}) store_.engine.overwrite(block, ++seed_);
    for (const BlockId block : kLoadedInto) store_.engine.overwrite(block, ++seed_);
    sent_ = of({3, 7});
    EXPECT_TRUE(store_.store->land(kSent, sent_.size()));
    LoadJob ahead = job();
    ahead.items[0].checksums.clear();
    store_.store->begin_ahead(ahead);
  }
  LoadJob job() const { return load_job("l", kSent, chunk_checksum(sent_), 8, kLoadedInto, 8); }
  std::vector<std::byte> of(const std::vector<BlockId>& blocks) {
    const std::vector<std::vector<BlockId>> table = {blocks};
    return store_.engine.expected({0, 8, table});
  }
  /// The peer writes these bytes of the chunk.
  void arrive(std::size_t from, std::size_t to) {
    const auto slot = store_.slot(kSent.slot, sent_.size());
    std::copy(sent_.begin() + static_cast<std::ptrdiff_t>(from), sent_.begin() + static_cast<std::ptrdiff_t>(to),
              slot.begin() + static_cast<std::ptrdiff_t>(from));
  }
  void unpack(bool is_readable = false, bool is_arriving = true) {
    store_.store->unpack_ahead([=](ChunkRef) { return is_readable; }, [=](ChunkRef) { return is_arriving; });
  }
  /// Ends the load, and returns whether all of the chunk is in the blocks.
  bool ends_well() {
    const auto outcomes = store_.load({job()});
    if (outcomes.size() != 1 || outcomes[0].tokens_loaded != 8) return false;
    const std::vector<std::vector<BlockId>> table = {kLoadedInto};
    store_.engine.note_loaded(sent_, 8, 0, {0, 8, table});
    const std::uint64_t before = store_.engine.num_wrong();
    store_.engine.read({0, 8, table});
    return store_.engine.num_wrong() == before;
  }
  /// Returns true if the blocks have the bytes that were sent.
  bool blocks_have(std::size_t first_bytes) {
    auto packer = make_host_packer(store_.engine.layouts()[0]).value();
    const std::vector<std::vector<BlockId>> table = {kLoadedInto};
    std::vector<std::byte> found(sent_.size());
    EXPECT_TRUE(packer->gather({0, 8, table}, found));
    return std::equal(found.begin(), found.begin() + static_cast<std::ptrdiff_t>(first_bytes), sent_.begin());
  }

  std::uint32_t seed_ = 0;
  TestStore store_{{StoreKind::kHost, 1}};
  std::vector<std::byte> sent_;
};

TEST_F(AheadLoads, ALayerIsUnpackedWhenTheNextOneIsThere) {
  const std::size_t layer = sent_.size() / store_.engine.layouts()[0].layers.size();
  unpack();
  EXPECT_FALSE(blocks_have(layer));
  arrive(0, layer);
  unpack();
  EXPECT_FALSE(blocks_have(layer)) << "its last bytes may be missing";
  arrive(layer, 2 * layer);
  unpack();
  EXPECT_TRUE(blocks_have(layer));
  arrive(2 * layer, sent_.size());
  EXPECT_TRUE(ends_well());
}

TEST_F(AheadLoads, AChunkThatIsWholeIsUnpackedToItsEnd) {
  arrive(0, sent_.size());
  unpack(true, false);
  EXPECT_TRUE(blocks_have(sent_.size()));
  store_.slot(kSent.slot, 1)[0] ^= std::byte{1};  // nothing is read again
  EXPECT_TRUE(ends_well());
}

TEST_F(AheadLoads, WhatWasReadTooEarlyIsUnpackedOnceMore) {
  arrive(1, sent_.size());  // the first byte is missing, and nothing tells so
  store_.slot(kSent.slot, 1)[0] = ~sent_[0];
  unpack();
  arrive(0, 1);
  EXPECT_TRUE(ends_well());
}

TEST_F(AheadLoads, AChunkThatIsDamagedInTheEndIsNotLoaded) {
  arrive(0, sent_.size());
  store_.slot(kSent.slot, 1)[0] ^= std::byte{1};
  unpack(true, false);
  const auto outcomes = store_.load({job()});
  EXPECT_EQ(outcomes.at(0).tokens_loaded, 0u);
  EXPECT_THAT(outcomes.at(0).corrupt, ElementsAre(kSent));
}

TEST_F(AheadLoads, ASlotThatWasGivenToAnotherChunkIsLeftAlone) {
  const auto before = of(kLoadedInto);
  arrive(0, sent_.size());
  unpack(false, false);
  EXPECT_EQ(of(kLoadedInto), before);
  EXPECT_FALSE(blocks_have(1));
}

TEST_F(AheadLoads, AJobThatWasDroppedIsUnpackedNoMore) {
  store_.store->drop_ahead(job());
  arrive(0, sent_.size());
  unpack(true, false);
  EXPECT_FALSE(blocks_have(sent_.size()));
  EXPECT_THAT(store_.all_loaded(), IsEmpty());
}

}  // namespace
}  // namespace kvferry
