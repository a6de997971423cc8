// Runs thousands of schedules on a GPU whose work runs late. The engine overwrites blocks right after it has saved
// them, gives blocks that it has just read or written to a load, and reads them as soon as the load is reported. "The
// network" reads slots as soon as they are reported, and writes where it may land. What was saved or has landed in a
// frame is loaded from it before it is in its slot, too. Some saves are packed by groups of layers, and some landings
// are verified by the store. In every third schedule the model's layers are unlike. Every byte is compared. Code that
// does not order its work by events, or does not fence it, fails for some seed.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>

#include "tests/connector/runtime/test_store.h"
#include "transport/base/checksum.h"

namespace kvferry {
namespace {

struct Faults {
  std::uint32_t refusal_in = 0;  // refuses one of this many calls on average; 0: none
  std::uint32_t delay_in = 0;    // lets the clock pass the store's deadline once in this many steps
  std::uint32_t damage_in = 0;   // damages a bit of a slot once in this many steps
};

/// Events that must have happened at least once in all walks of a kind, because otherwise the walks prove nothing.
struct Tally {
  std::uint64_t saved = 0, save_failed = 0, loaded = 0, corrupt = 0, load_failed = 0, landed = 0, land_failed = 0,
                fenced = 0, refused_slots = 0, shared_loads = 0, early_loads = 0, saved_early = 0, layers_read = 0,
                spoiled = 0;
};

class Walk {
 public:
  Walk(StoreOptions options, Faults faults, Tally& tally)
      : random_(options.seed), faults_(faults), tally_(tally), test_(options), slots_(options.num_slots) {
    for (BlockId block = 0; block < static_cast<BlockId>(ToyEngine::kNumBlocks); ++block)
      test_.engine.overwrite(block, random_());
  }

  void run(int num_actions) {
    const std::uint64_t num_waits = test_.device->num_host_waits(), num_allocations = test_.device->num_allocations();
    for (int i = 0; i < num_actions; ++i) {
      if (once_in(faults_.refusal_in))
        test_.device->refuse_after(static_cast<int>(below(12)), 1 + static_cast<int>(below(2)));
      if (once_in(faults_.delay_in)) test_.clock.advance(TestStore::kTimeout + 1);
      act();
      for (std::uint32_t steps = below(4); steps > 0; --steps) test_.device->step();
      take_news();
    }
    test_.device->refuse_next(0);
    ASSERT_EQ(test_.device->num_host_waits(), num_waits);
    ASSERT_EQ(test_.device->num_allocations(), num_allocations);
    finish();
  }

 private:
  /// kInFrame: the chunk can be loaded from its frame, but is not in its slot yet.
  enum class State { kFree, kSaving, kLanding, kInFrame, kReady };
  struct Slot {
    State state = State::kFree;
    std::uint64_t generation = 0;
    std::uint32_t tokens = 0;
    std::vector<std::byte> bytes;  // the bytes that the slot must have when it is ready
    std::uint64_t checksum = 0;
    bool is_damaged = false;
    ChunkStore::Place place;  // where the chunk lands
    std::size_t written = 0;  // number of the chunk's bytes that have arrived
    bool is_spoiled = false;  // true if wrong bytes have arrived, which the store must notice
    bool is_told = false;     // true after landed() was called for this landing
    std::uint32_t loads = 0;  // loads of the chunk that are in flight
  };

  std::uint32_t below(std::size_t n) { return static_cast<std::uint32_t>(random_() % n); }
  bool once_in(std::uint32_t times) { return times != 0 && below(times) == 0; }
  ChunkRef ref(std::uint32_t slot) const { return {slot, slots_[slot].generation}; }

  /// Returns up to `count` blocks that no load in flight owns.
  std::vector<BlockId> some_blocks(std::size_t count) {
    std::vector<BlockId> blocks;
    for (BlockId block = 0; block < static_cast<BlockId>(ToyEngine::kNumBlocks); ++block)
      if (!loading_.contains(block)) blocks.push_back(block);
    std::shuffle(blocks.begin(), blocks.end(), random_);
    blocks.resize(std::min(count, blocks.size()));
    return blocks;
  }

  void act() {
    switch (below(6)) {
      case 0:
      case 1:
        return save();
      case 2:
      case 3:
        return load();
      case 4:
        return land();
      default:
        return go_on_landing();
    }
  }

  /// Returns up to `count` slots that may get a new chunk now.
  std::vector<std::uint32_t> slots_to_fill(std::size_t count) {
    std::vector<std::uint32_t> found;
    for (std::uint32_t i = 0; i < slots_.size(); ++i)
      if (slots_[i].loads == 0 && (slots_[i].state == State::kFree || slots_[i].state == State::kReady))
        found.push_back(i);
    std::shuffle(found.begin(), found.end(), random_);
    found.resize(std::min(found.size(), count));
    for (const std::uint32_t slot : found) {
      const std::uint64_t generation = slots_[slot].generation + 1;
      slots_[slot] = {};
      slots_[slot].generation = generation;
    }
    return found;
  }

  void save() {
    std::vector<SaveJob> jobs;
    if (some_blocks(3).size() < 3) return;
    for (const std::uint32_t slot : slots_to_fill(1 + below(3))) {
      Slot& saved = slots_[slot];
      saved.state = State::kSaving;
      saved.tokens = 1 + below(ToyEngine::kChunkTokens);
      const std::uint32_t first = below(3);
      jobs.push_back(save_job("s", ref(slot), some_blocks(3), saved.tokens, first));
      saved.bytes = test_.engine.expected({first, saved.tokens, jobs.back().block_ids});
      saved.checksum = chunk_checksum(saved.bytes);
    }
    if (jobs.empty()) return;
    for (std::uint32_t end = 1 + below(3); below(2) == 0; end += 1 + below(2)) {
      test_.store->save_layers(jobs, end, test_.engine.stream());
      for (std::uint32_t steps = below(20); steps > 0; --steps) test_.device->step();
      read_layers();
    }
    test_.save(jobs);
    // The forward pass of the next step overwrites the blocks.
    for (const SaveJob& job : jobs)
      for (const BlockId block : job.block_ids[0])
        if (below(2) == 0) test_.engine.overwrite(block, random_());
  }

  /// Reads layers as soon as they are told, as a peer does.
  void read_layers() {
    for (const ChunkStore::SavedLayers& told : test_.store->take_layers()) {
      const std::vector<std::uint32_t> pinned = test_.store->pin_frames(
          ++leases_, told.chunks, test_.clock.now() + kSecond, std::vector<bool>(told.chunks.size(), true));
      for (std::size_t i = 0; i < pinned.size(); ++i) {
        const Slot& slot = slots_[told.chunks[i].slot];
        if (pinned[i] == kNoFrame || !test_.store->frames() || told.chunks[i] != ref(told.chunks[i].slot)) continue;
        const std::byte* const frame =
            test_.book.base(test_.store->frames()->region) + pinned[i] * test_.store->frames()->frame_bytes;
        std::uint64_t bytes = 0;
        std::uint32_t layers = told.num_layers;
        for (const KvLayout& layout : test_.engine.layouts()) {
          const auto some = std::min<std::uint32_t>(layers, static_cast<std::uint32_t>(layout.layers.size()));
          bytes += slot.tokens * layout.bytes_per_token() / layout.layers.size() * some;
          layers -= some;
        }
        ASSERT_TRUE(std::equal(frame, frame + bytes, slot.bytes.begin())) << "layers were told too early";
        tally_.layers_read += 1;
      }
      test_.store->unpin_frames(leases_);
    }
  }

  void load() {
    std::vector<LoadJob> jobs;
    std::vector<BlockId> blocks = some_blocks(ToyEngine::kNumBlocks);
    for (std::size_t i = 0; i <= below(3); ++i) {
      const std::uint32_t slot = below(slots_.size());
      const bool is_early = slots_[slot].state == State::kInFrame;
      if ((slots_[slot].state != State::kReady && !is_early) || blocks.size() < 2) continue;
      tally_.early_loads += is_early ? 1 : 0;
      const std::vector<BlockId> own(blocks.end() - 2, blocks.end());
      blocks.resize(blocks.size() - 2);
      const std::uint32_t skip = below(slots_[slot].tokens);
      const std::uint32_t count = 1 + below(slots_[slot].tokens - skip);
      for (const BlockId block : own) test_.engine.overwrite(block, random_());
      jobs.push_back(load_job("l", ref(slot), slots_[slot].checksum, slots_[slot].tokens, own, count, skip));
      slots_[slot].loads += 1;
      loading_.insert(own.begin(), own.end());
    }
    if (jobs.empty()) return;
    test_.begin_load(jobs);
    for (const LoadJob& job : jobs) tally_.shared_loads += slots_[job.items[0].chunk.slot].loads > 1 ? 1 : 0;
  }

  void judge_load(const LoadJob& job, const LoadOutcome& outcome) {
    const LoadItem& item = job.items[0];
    Slot& slot = slots_[item.chunk.slot];
    ASSERT_EQ(item.chunk, ref(item.chunk.slot)) << "told twice, or late";
    ASSERT_GT(slot.loads, 0u) << "told twice";
    slot.loads -= 1;
    for (const BlockId block : job.block_ids[0]) ASSERT_EQ(loading_.erase(block), 1u) << "told twice";
    if (outcome.tokens_loaded == 0) {
      ASSERT_TRUE(outcome.corrupt.empty() || slot.is_damaged) << "good bytes are called corrupt";
      ASSERT_TRUE(!outcome.corrupt.empty() || faults_.refusal_in > 0 || faults_.delay_in > 0)
          << "a load failed for nothing";
      (outcome.corrupt.empty() ? tally_.load_failed : tally_.corrupt) += 1;
      // the engine computes these blocks again
      for (const BlockId block : job.block_ids[0]) test_.engine.overwrite(block, random_());
      if (!outcome.corrupt.empty()) slot.state = State::kFree;  // condemned
      return;
    }
    ASSERT_EQ(outcome.tokens_loaded, item.num_tokens);
    tally_.loaded += 1;
    const TokenRun run{item.first_token, item.num_tokens, job.block_ids};
    test_.engine.note_loaded(slot.bytes, item.chunk_tokens, item.skip_tokens, run);
    test_.engine.read(run);
  }

  void land() {
    const auto found = slots_to_fill(1);
    if (found.empty()) return;
    Slot& slot = slots_[found[0]];
    slot.tokens = 1 + below(ToyEngine::kChunkTokens);
    slot.bytes.resize(slot.tokens * test_.engine.chunk_bytes() / ToyEngine::kChunkTokens);
    for (std::byte& b : slot.bytes) b = static_cast<std::byte>(random_());
    slot.checksum = chunk_checksum(slot.bytes);
    const Result<ChunkStore::Place> place = test_.store->land(ref(found[0]), slot.bytes.size());
    if (!place) {
      tally_.refused_slots += 1;
      return;
    }
    slot.place = *place;
    slot.state = State::kLanding;
  }

  /// Lets more bytes arrive. When all bytes are there, ends their transfer.
  void go_on_landing() {
    std::vector<ChunkStore::Landed> landed;
    for (std::uint32_t i = 0; i < slots_.size(); ++i) {
      Slot& slot = slots_[i];
      if (slot.state != State::kLanding || slot.is_told) continue;
      const std::size_t more = std::min(slot.bytes.size() - slot.written, std::size_t{1} + below(slot.bytes.size()));
      std::memcpy(test_.book.base(slot.place.region) + slot.place.offset + slot.written,
                  slot.bytes.data() + slot.written, more);
      slot.written += more;
      const bool is_lost = below(10) == 0;
      if (!is_lost && slot.written < slot.bytes.size()) continue;
      slot.is_told = true;
      const bool is_in_frame = test_.store->frames() && slot.place.region == test_.store->frames()->region;
      const bool is_verified = !is_in_frame || below(2) == 0;
      slot.is_spoiled = faults_.damage_in > 0 && !is_lost && !is_verified && below(5) == 0;
      if (slot.is_spoiled)
        test_.book.base(slot.place.region)[slot.place.offset + below(slot.bytes.size())] ^= std::byte{1};
      tally_.spoiled += slot.is_spoiled ? 1 : 0;
      landed.push_back({ref(i), !is_lost, slot.checksum, false, is_verified});
    }
    if (!landed.empty()) test_.store->landed(landed);
  }

  void take_news() {
    read_layers();
    for (const ChunkStore::Loaded& load : test_.store->take_loaded()) {
      judge_load(load.job, load.outcome);
      if (::testing::Test::HasFatalFailure()) return;
    }
    for (const SaveDone& done : test_.store->take_saved()) {
      Slot& slot = slots_[done.chunk.slot];
      if (done.is_in_frame) {
        ASSERT_TRUE(done.ok && slot.state == State::kSaving && done.chunk == ref(done.chunk.slot));
        ASSERT_EQ(done.checksum, slot.checksum);
        slot.state = State::kInFrame;
        tally_.saved_early += 1;
        continue;
      }
      ended(done.chunk, slot.state == State::kInFrame ? State::kInFrame : State::kSaving, done.ok, done.checksum);
      (done.ok ? tally_.saved : tally_.save_failed) += 1;
    }
    for (const ChunkStore::Landed& done : test_.store->take_landed()) {
      Slot& slot = slots_[done.chunk.slot];
      ASSERT_TRUE(slot.is_told);
      ASSERT_FALSE(done.ok && slot.is_spoiled);
      if (done.is_in_frame) {
        ASSERT_TRUE(done.ok && slot.state == State::kLanding && done.chunk == ref(done.chunk.slot));
        slot.state = State::kInFrame;
        continue;
      }
      ended(done.chunk, slot.state == State::kInFrame ? State::kInFrame : State::kLanding, done.ok, done.checksum);
      (done.ok ? tally_.landed : tally_.land_failed) += 1;
    }
    tally_.fenced += test_.store->num_fenced() > 0 ? 1 : 0;
    read_slots();
  }

  void ended(ChunkRef chunk, State state, bool ok, std::uint64_t checksum) {
    Slot& slot = slots_[chunk.slot];
    ASSERT_EQ(chunk, ref(chunk.slot)) << "told twice, or late";
    ASSERT_EQ(slot.state, state) << "told twice";
    slot.state = ok ? State::kReady : State::kFree;
    if (ok) {
      ASSERT_EQ(checksum, slot.checksum);
    } else if (state == State::kSaving) {
      ASSERT_TRUE(faults_.refusal_in > 0 || faults_.delay_in > 0) << "a save failed for nothing";
    }
  }

  /// Reads a slot that was reported, as peers may do at any time.
  void read_slots() {
    for (std::uint32_t i = 0; i < slots_.size(); ++i) {
      Slot& slot = slots_[i];
      if (slot.state != State::kReady || slot.is_damaged) continue;
      ASSERT_TRUE(std::ranges::equal(test_.slot(i, slot.bytes.size()), slot.bytes)) << "slot " << i;
      if (once_in(faults_.damage_in)) {
        test_.slot(i, slot.bytes.size())[below(slot.bytes.size())] ^= std::byte{4};
        slot.is_damaged = true;
      }
    }
  }

  void finish() {
    for (int i = 0; i < 20; ++i) go_on_landing();
    for (int i = 0; i < 3; ++i) {  // an event that the device refused before is requested again now
      test_.device->run_all();
      take_news();
    }
    ASSERT_TRUE(loading_.empty()) << "a load was not told";
    for (const Slot& slot : slots_) ASSERT_TRUE(slot.state == State::kReady || slot.state == State::kFree);
    ASSERT_EQ(test_.store->num_fenced(), 0u);
    ASSERT_EQ(test_.engine.num_wrong(), 0u) << "the model read wrong KV";
    const std::shared_ptr<SimDevice> device = test_.device;
    test_.store.reset();
    ASSERT_EQ(device->num_alive(), 1u);  // the engine's stream
    ASSERT_EQ(test_.book.num_regions(), 1u);
  }

  std::mt19937 random_;
  Faults faults_;
  Tally& tally_;
  TestStore test_;
  std::vector<Slot> slots_;
  std::uint64_t leases_ = 0;
  std::set<BlockId> loading_;  // blocks of loads in flight
};

class GpuStoreWalks : public ::testing::TestWithParam<StoreKind> {
 protected:
  Tally walk(Faults faults, std::uint32_t first_seed, std::uint32_t num_seeds) {
    Tally tally;
    const std::uint64_t early = num_passes_ended_early();
    for (std::uint32_t seed = first_seed; seed < first_seed + num_seeds; ++seed) {
      const bool has_unlike_layers = seed % 3 == 0;
      Walk({GetParam(), seed, 4 + seed % 4, 1 + seed % 5, has_unlike_layers}, faults, tally).run(60);
      if (HasFatalFailure()) {
        ADD_FAILURE() << "seed " << seed;
        break;
      }
    }
    if (faults.refusal_in == 0) {
      EXPECT_EQ(num_passes_ended_early(), early) << "the host would have waited";
    }
    EXPECT_GT(tally.saved, 0u);
    EXPECT_GT(tally.loaded, 0u);
    EXPECT_GT(tally.shared_loads, 0u);
    EXPECT_GT(tally.landed, 0u);
    EXPECT_EQ(tally.early_loads > 0, GetParam() != StoreKind::kGpuWithoutFrames);
    EXPECT_EQ(tally.saved_early > 0, GetParam() != StoreKind::kGpuWithoutFrames);
    EXPECT_EQ(tally.layers_read > 0, GetParam() == StoreKind::kGpuWhereChunksLand);
    return tally;
  }
};

TEST_P(GpuStoreWalks, WithAGpuThatDoesItsWork) {
  const Tally tally = walk({}, 0, 1500);
  EXPECT_EQ(tally.save_failed + tally.load_failed + tally.corrupt + tally.fenced + tally.refused_slots, 0u);
}

TEST_P(GpuStoreWalks, WithAGpuThatRefuses) {
  const Tally tally = walk({.refusal_in = 4}, 100'000, 1500);
  EXPECT_GT(tally.save_failed, 0u);
  EXPECT_GT(tally.load_failed, 0u);
  EXPECT_GT(tally.fenced, 0u);
}

TEST_P(GpuStoreWalks, WithAGpuThatIsLate) {
  const Tally tally = walk({.delay_in = 5}, 200'000, 1500);
  EXPECT_GT(tally.save_failed, 0u);
  EXPECT_GT(tally.fenced, 0u);
  EXPECT_GT(tally.refused_slots, 0u);
}

TEST_P(GpuStoreWalks, WithMemoryThatLosesBitsAndAllElse) {
  const Tally tally = walk({.refusal_in = 9, .delay_in = 20, .damage_in = 15}, 300'000, 1500);
  EXPECT_GT(tally.corrupt, 0u);
  EXPECT_EQ(tally.spoiled > 0, GetParam() == StoreKind::kGpuWhereChunksLand);
}

std::string schedule_name(const ::testing::TestParamInfo<StoreKind>& info) {
  constexpr const char* kNames[] = {"Host", "WithoutFrames", "Frames", "LandingInFrames"};
  return kNames[static_cast<std::size_t>(info.param)];
}
INSTANTIATE_TEST_SUITE_P(All, GpuStoreWalks,
                         ::testing::Values(StoreKind::kGpuWithoutFrames, StoreKind::kGpu,
                                           StoreKind::kGpuWhereChunksLand),
                         schedule_name);

}  // namespace
}  // namespace kvferry
