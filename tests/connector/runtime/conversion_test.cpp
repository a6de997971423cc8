// Tests chunk stores whose chunks have elements of another type than the blocks, and a node that converts what it
// loads, between real nodes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "controller/api/status.h"
#include "kernels/chunk_shape.h"
#include "tests/connector/runtime/test_node.h"
#include "tests/connector/runtime/test_store.h"
#include "tests/kernels/random_cache.h"
#include "tests/kernels/reference_packer.h"
#include "transport/base/checksum.h"

namespace kvferry {
namespace {

using enum ElementType;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr std::uint32_t kTokens = 12, kChunkTokens = 16;
const ChunkRef kChunk{1, 1};
const std::vector<std::vector<BlockId>> kTables = {{3, 1, 4}};

struct Conversion {
  const char* name;
  ElementType cache_type, chunk_type;
  bool is_on_gpu = false;
};

class ConvertingStores : public ::testing::TestWithParam<Conversion> {
 protected:
  ConvertingStores()
      : cache_(shape()),
        expected_(shape()),
        reference_(make_reference_packer(expected_.layout(), format()).value()),
        token_bytes_(reference_->chunk_bytes_per_token()),
        pool_(2 * kChunkTokens * token_bytes_) {
    const RegionId region = *book_.register_region(MemoryRegion{pool_.data(), pool_.size()});
    ChunkStoreParts parts{{cache_.layout()}, 0, pool_, kChunkTokens * token_bytes_, region, {format()}};
    if (!GetParam().is_on_gpu) {
      store_ = make_host_store(std::move(parts)).value();
      return;
    }
    device_ = std::make_shared<SimDevice>(1);
    const std::uint64_t frames = 4 * kChunkTokens * token_bytes_;
    store_ = make_gpu_store(std::move(parts), {make_sim_gpu(device_), frames, false, kSecond, clock_, book_}).value();
  }
  static CacheShape shape() {
    return {
        .blocks = 6, .element_bytes = bytes_of(GetParam().cache_type), .order = kCpuAttention, .key_transposed = true};
  }
  static ChunkFormat format() { return {{}, GetParam().cache_type, GetParam().chunk_type, {}}; }
  std::span<std::byte> chunk() { return std::span(pool_).subspan(kChunkTokens * token_bytes_, kTokens * token_bytes_); }
  /// Puts a chunk of random elements into the slot, as a transfer would. Returns its checksum.
  std::uint64_t received() {
    std::ranges::copy(random_.bytes(chunk().size()), chunk().begin());
    EXPECT_TRUE(reference_->scatter(chunk(), kTokens, 0, {0, kTokens, kTables}));
    return chunk_checksum(chunk());
  }
  LoadJob load_job(std::uint64_t checksum) const {
    return {"l", 1, kTables, {{kChunk, {checksum}, kTokens, 0, 0, kTokens}}, true};
  }
  LoadOutcome load(std::uint64_t checksum) {
    store_->load(
        {load_job(checksum)}, [](ChunkRef) { return true; }, nullptr);
    if (device_) device_->run_all();
    return store_->take_loaded().at(0).outcome;
  }

  Random random_{7};
  StillTransport book_;
  ManualClock clock_;
  std::shared_ptr<SimDevice> device_;
  TestCache cache_, expected_;
  std::unique_ptr<Packer> reference_;
  std::uint64_t token_bytes_;
  std::vector<std::byte> pool_;
  std::unique_ptr<ChunkStore> store_;
};

TEST_P(ConvertingStores, ALoadConvertsAndVerifiesTheChunksOwnBytes) {
  const std::uint64_t checksum = received();
  EXPECT_EQ(load(checksum).tokens_loaded, kTokens);
  EXPECT_EQ(cache_.memory(), expected_.memory());
  chunk()[5] ^= std::byte{1};
  if (GetParam().is_on_gpu) return;  // a frame still has the chunk as it was
  EXPECT_THAT(load(checksum).corrupt, ElementsAre(kChunk));
}

TEST_P(ConvertingStores, ASaveConvertsAndHashesTheChunksBytes) {
  const std::vector<std::byte> memory = random_.bytes(cache_.memory().size());
  cache_.set_memory(memory);
  expected_.set_memory(memory);
  store_->save({{"s", kTables, {{kChunk, 0, kTokens, 0, 0}}}}, nullptr);
  if (device_) device_->run_all();
  const std::vector<SaveDone> saved = store_->take_saved();
  ASSERT_EQ(saved.size(), 1u);
  std::vector<std::byte> want(kTokens * token_bytes_);
  EXPECT_EQ(saved[0].checksum, reference_->gather({0, kTokens, kTables}, want).value());
  EXPECT_TRUE(std::ranges::equal(chunk(), want));
}

TEST_P(ConvertingStores, LayersAreUnpackedAheadOfTheRest) {
  if (GetParam().is_on_gpu) GTEST_SKIP() << "a GPU unpacks nothing ahead";
  ASSERT_TRUE(store_->land(kChunk, chunk().size()));
  LoadJob ahead = load_job(0);
  ahead.items[0].checksums.clear();
  store_->begin_ahead(ahead);
  const std::uint64_t checksum = received();
  store_->unpack_ahead([](ChunkRef) { return false; }, [](ChunkRef) { return true; });
  EXPECT_NE(cache_.memory(), std::vector<std::byte>(cache_.memory().size())) << "the first layer is unpacked";
  EXPECT_NE(cache_.memory(), expected_.memory()) << "the last layer may lack its end";
  EXPECT_EQ(load(checksum).tokens_loaded, kTokens);
  EXPECT_EQ(cache_.memory(), expected_.memory());
}

INSTANTIATE_TEST_SUITE_P(
    Types, ConvertingStores,
    ::testing::Values(Conversion{"bf16_to_fp8", kE4m3, kBf16}, Conversion{"bf16_to_fp8_e5m2", kE5m2, kBf16},
                      Conversion{"fp8_to_bf16", kBf16, kE4m3}, Conversion{"bf16_to_fp16", kFp16, kBf16},
                      Conversion{"fp16_to_bf16", kBf16, kFp16}, Conversion{"fp32_to_bf16", kBf16, kFp32},
                      Conversion{"bf16_to_fp32", kFp32, kBf16}, Conversion{"fp16_to_fp8", kE4m3, kFp16},
                      Conversion{"bf16_to_fp8_on_gpu", kE4m3, kBf16, true},
                      Conversion{"fp16_to_bf16_on_gpu", kBf16, kFp16, true}),
    [](const auto& one) { return std::string(one.param.name); });

/// Computes and saves a prompt on a node, and returns the request that a router then sends to another node.
NewRequest prefilled(TestNode& node, const std::vector<std::int32_t>& prompt, const std::string& push_to = "") {
  NewRequest made = new_request("p", prompt);
  made.handoff = true;
  if (!push_to.empty()) made.push_to = push_to;
  const std::uint32_t n = made.num_prompt_tokens;
  node.scheduler->add_request(made);
  EXPECT_EQ(node.lookup("p"), 0u);
  node.scheduler->allocated(made.id, 0, {kSomeBlocks});
  node.step({{{made.id, 0, n, BlockTable{kSomeBlocks}}}, {}}, [&] {
    node.compute(kSomeBlocks, 0, n, 1);
    for (std::uint32_t layer = 0; layer < TestNode::kLayers; ++layer) node.worker->save_layer(layer);
  });
  const FinishedRequest done = node.scheduler->finished(made.id, n, {kSomeBlocks}, false);
  node.step();
  NewRequest handed = new_request("d", prompt);
  handed.source = HandoffSource{node.endpoint(), done.handoff_name, done.handoff_tokens};
  return handed;
}

// The holder's chunks are of bf16, as those of a server with bf16, although its blocks are of fp32 here as well.
class ConvertingNodes : public ::testing::Test {
 protected:
  TestController controller_;
  TestNode holder_{controller_.endpoint(), "holder", "toy", "", nullptr, "kv_both", kBf16};
  TestNode reader_{controller_.endpoint(), "reader", "toy", "", nullptr, "kv_both", kBf16, "bfloat16 to float32"};
};

TEST_F(ConvertingNodes, APulledPromptIsConvertedAndNothingOfTheReadersOwnIsSaved) {
  const auto prompt = tokens(21);
  EXPECT_EQ(load(reader_, prefilled(holder_, prompt), 1), 20u);
  EXPECT_EQ(reader_.scheduler->metrics()["pulled_chunks_total"], 3);
  reader_.scheduler->finished(RequestId{"d"}, 21, {kOtherBlocks}, false);
  const auto other = tokens(21, 500);
  NewRequest own = new_request("own", other);
  reader_.scheduler->add_request(own);
  EXPECT_EQ(reader_.lookup("own"), 0u);
  reader_.scheduler->allocated(own.id, 0, {kSomeBlocks});
  reader_.step({{{own.id, 0, 21, BlockTable{kSomeBlocks}}}, {}}, [] {});
  reader_.scheduler->finished(own.id, 21, {kSomeBlocks}, false);
  reader_.step();
  EXPECT_EQ(reader_.scheduler->metrics()["saved_chunks_total"], 0);
}

TEST_F(ConvertingNodes, APushedPromptIsConverted) {
  const auto prompt = tokens(21);
  const NewRequest handed = prefilled(holder_, prompt, reader_.endpoint());
  const auto has_come = [&] { return reader_.scheduler->metrics()["received_chunks_total"] == 3; };
  for (int i = 0; i < 2000 && !has_come(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  ASSERT_TRUE(has_come());
  EXPECT_EQ(load(reader_, handed, 1), 20u);
  EXPECT_EQ(reader_.scheduler->metrics()["pulls_total"], 0);
}

TEST_F(ConvertingNodes, TheStatusAndTheLogTellIt) {
  const controller::Status status = value_or_throw(controller::fetch_status(controller_.endpoint(), 10'000));
  for (const auto& node : status.nodes)
    EXPECT_EQ(node.details.conversion, node.engine_id.value == "reader" ? "bfloat16 to float32" : "");
  EXPECT_THAT(reader_.worker->describe(), HasSubstr("; loads convert bf16 of chunks to fp32 of the KV cache"));
}

TEST(ConvertingWorkers, FormatsThatDontFitTheLayoutsAreRefused) {
  TestCache cache(CacheShape{.element_bytes = 2});
  WorkerOptions options{{}, 0, "conversion-test", {cache.layout()}};
  options.formats = {{{}, kE4m3, kBf16, {}}};
  EXPECT_THAT(WorkerNode::start(options).error().what, HasSubstr("the cache's elements have 2 bytes"));
  options.formats.push_back({});
  EXPECT_THAT(WorkerNode::start(options).error().what, HasSubstr("rank 0 has 1 KV layouts, but element types for 2"));
}

}  // namespace
}  // namespace kvferry
