// Tests the GPU store's loads, which end after the call: when they are told, what they keep in use meanwhile, and that
// the engine's blocks are never written after the load was told.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/connector/runtime/test_store.h"

namespace kvferry {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

/// A store with a chunk of four tokens in slot 0 that is in no frame.
class ColdChunk {
 public:
  explicit ColdChunk(StoreModel model, std::uint32_t seed = 1)
      : test({model.kind, seed, 6, 1, model.has_unlike_layers}) {
    test.engine.overwrite(3, 1);
    test.save({save_job("r", {0, 1}, {3}, 4)});
    sum = test.all_saved().at(0).checksum;
    const std::vector<std::vector<BlockId>> table = {{3}};
    bytes = test.engine.expected({0, 4, table});
    test.save({save_job("r", {1, 1}, {3}, 4)});  // takes the only frame
    test.all_saved();
  }
  LoadJob job(BlockId block, const std::string& request = "l") const {
    return load_job(request, {0, 1}, sum, 4, {block}, 4);
  }
  /// Returns true if the engine would read the chunk in this block from now on.
  bool holds(BlockId block) {
    const std::vector<std::vector<BlockId>> table = {{block}};
    test.engine.note_loaded(bytes, 4, 0, {0, 4, table});
    return reads_right(block);
  }
  bool reads_right(BlockId block) {
    const std::vector<std::vector<BlockId>> table = {{block}};
    const std::uint64_t before = test.engine.num_wrong();
    test.engine.read({0, 4, table});
    test.run();
    return test.engine.num_wrong() == before;
  }

  TestStore test;
  std::uint64_t sum = 0;
  std::vector<std::byte> bytes;
};

class GpuLoads : public ::testing::TestWithParam<StoreModel> {};

TEST_P(GpuLoads, AreToldWhenTheBlocksAreWrittenAndNotBefore) {
  ColdChunk chunk(GetParam());
  chunk.test.begin_load({chunk.job(5)});
  EXPECT_THAT(chunk.test.store->take_loaded(), IsEmpty());
  for (int step = 0; step < 3; ++step) chunk.test.store->take_saved();  // steps of the engine without news
  EXPECT_THAT(chunk.test.store->take_loaded(), IsEmpty());
  chunk.test.run();
  const auto loads = chunk.test.store->take_loaded();
  ASSERT_THAT(loads, SizeIs(1));
  EXPECT_EQ(loads[0].job.request_id, "l");
  EXPECT_EQ(loads[0].outcome.tokens_loaded, 4u);
  EXPECT_TRUE(chunk.holds(5));
  EXPECT_THAT(chunk.test.store->take_loaded(), IsEmpty());
}

TEST_P(GpuLoads, BeginWhenTheEngineHasReadAndWrittenTheBlocks) {
  for (std::uint32_t seed = 0; seed < 100; ++seed) {
    ColdChunk chunk(GetParam(), seed);
    const std::vector<std::vector<BlockId>> table = {{5}};
    chunk.test.engine.overwrite(5, seed);
    chunk.test.engine.read({0, 4, table});
    chunk.test.begin_load({chunk.job(5)});
    EXPECT_EQ(chunk.test.all_loaded().at(0).tokens_loaded, 4u);
    EXPECT_TRUE(chunk.holds(5)) << "seed " << seed;
  }
}

TEST_P(GpuLoads, ThatAreInFlightMayShareAChunk) {
  for (std::uint32_t seed = 0; seed < 100; ++seed) {
    ColdChunk chunk(GetParam(), seed);
    chunk.test.begin_load({chunk.job(5, "a")});
    for (std::uint32_t step = 0; step < seed % 5; ++step) chunk.test.device->step();
    chunk.test.begin_load({chunk.job(6, "b"), chunk.job(7, "c")});
    const auto outcomes = chunk.test.all_loaded();
    ASSERT_THAT(outcomes, SizeIs(3));
    for (const LoadOutcome& outcome : outcomes) EXPECT_EQ(outcome.tokens_loaded, 4u);
    for (const BlockId block : {5, 6, 7}) EXPECT_TRUE(chunk.holds(block)) << "seed " << seed;
    if (GetParam().kind == StoreKind::kGpuWithoutFrames) continue;
    const std::uint64_t before = num_passes_hashed();
    EXPECT_EQ(chunk.test.load({chunk.job(8)}).at(0).tokens_loaded, 4u);
    EXPECT_EQ(num_passes_hashed(), before) << "seed " << seed << ": the chunk is in its frame and was verified";
  }
}

TEST_P(GpuLoads, OfAChunkThatIsDamagedMeanwhileFail) {
  ColdChunk chunk(GetParam());
  chunk.test.begin_load({chunk.job(5)});
  chunk.test.slot(0, 100)[99] ^= std::byte{1};
  const auto outcomes = chunk.test.all_loaded();
  ASSERT_THAT(outcomes, SizeIs(1));
  EXPECT_EQ(outcomes[0].tokens_loaded, 0u);
  EXPECT_THAT(outcomes[0].corrupt, ElementsAre(ChunkRef{0, 1}));
}

TEST_P(GpuLoads, KeepTheirSlotFromOthers) {
  ColdChunk chunk(GetParam());
  chunk.test.begin_load({chunk.job(5)});
  EXPECT_EQ(chunk.test.store->land_in_slot({0, 2}, 64).error().code, ErrorCode::kFull);
  chunk.test.run();
  EXPECT_TRUE(chunk.test.store->land_in_slot({0, 2}, 64));
}

TEST_P(GpuLoads, ThatTheGpuDoesNotEndInTimeFailAndNeverWriteAfterTheEngine) {
  for (std::uint32_t seed = 0; seed < 200; ++seed) {
    ColdChunk chunk(GetParam(), seed);
    chunk.test.begin_load({chunk.job(5)});
    for (std::uint32_t step = 0; step < seed % 4; ++step) chunk.test.device->step();
    chunk.test.clock.advance(TestStore::kTimeout - 1);
    if (!chunk.test.store->take_loaded().empty()) continue;  // this device was fast
    chunk.test.clock.advance(1);
    const auto loads = chunk.test.store->take_loaded();
    ASSERT_THAT(loads, SizeIs(1));
    EXPECT_EQ(loads[0].outcome.tokens_loaded, 0u);
    EXPECT_THAT(loads[0].outcome.corrupt, IsEmpty());
    EXPECT_EQ(chunk.test.store->num_fenced(), 1u);
    EXPECT_EQ(chunk.test.store->land_in_slot({0, 2}, 64).error().code, ErrorCode::kFull);
    chunk.test.engine.overwrite(5, seed);  // the engine computes the KV itself
    EXPECT_TRUE(chunk.reads_right(5)) << "seed " << seed;
    EXPECT_THAT(chunk.test.store->take_loaded(), IsEmpty());
    EXPECT_EQ(chunk.test.store->num_fenced(), 0u);
    EXPECT_EQ(chunk.test.load({chunk.job(6)}).at(0).tokens_loaded, 4u);
  }
}

TEST_P(GpuLoads, ThatTheGpuRefusesHalfwayNeverWriteAfterTheEngine) {
  bool has_failed = false, has_ended_well = false;
  for (int granted = 0; granted < 24; ++granted) {
    for (std::uint32_t seed = 0; seed < 60; ++seed) {
      ColdChunk chunk(GetParam(), seed);
      chunk.test.device->refuse_after(granted, 1 + static_cast<int>(seed % 3));
      chunk.test.begin_load({chunk.job(5)});
      std::vector<ChunkStore::Loaded> loads;
      for (int step = 0; step < 100 && loads.empty(); ++step) {
        loads = chunk.test.store->take_loaded();
        if (step == 50) chunk.test.clock.advance(TestStore::kTimeout);
        if (loads.empty()) chunk.test.device->step();
      }
      ASSERT_THAT(loads, SizeIs(1));
      chunk.test.device->refuse_next(0);
      EXPECT_THAT(loads[0].outcome.corrupt, IsEmpty());
      if (loads[0].outcome.tokens_loaded == 4) {
        has_ended_well = true;
        EXPECT_TRUE(chunk.holds(5)) << granted << " calls granted, seed " << seed;
      } else {
        has_failed = true;
        chunk.test.engine.overwrite(5, seed);
        EXPECT_TRUE(chunk.reads_right(5)) << granted << " calls granted, seed " << seed;
      }
      for (int i = 0; i < 3; ++i) chunk.test.all_loaded();
      EXPECT_EQ(chunk.test.store->num_fenced(), 0u);
    }
  }
  EXPECT_TRUE(has_failed && has_ended_well);
}

TEST_P(GpuLoads, OfWhichTheGpuRefusesAllAreToldAtOnce) {
  ColdChunk chunk(GetParam());
  chunk.test.device->refuse_next(1);
  chunk.test.begin_load({chunk.job(5)});
  const auto loads = chunk.test.store->take_loaded();
  ASSERT_THAT(loads, SizeIs(1));
  EXPECT_EQ(loads[0].outcome.tokens_loaded, 0u);
  EXPECT_THAT(loads[0].outcome.corrupt, IsEmpty());
}

INSTANTIATE_TEST_SUITE_P(All, GpuLoads,
                         ::testing::Values(StoreModel{StoreKind::kGpuWithoutFrames, false},
                                           StoreModel{StoreKind::kGpu, false},
                                           StoreModel{StoreKind::kGpuWithoutFrames, true},
                                           StoreModel{StoreKind::kGpu, true}),
                         [](const auto& model) { return store_model_name(model.param); });

}  // namespace
}  // namespace kvferry
