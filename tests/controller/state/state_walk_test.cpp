// Tests a walk through the state while the state changes, and whether another directory can be restored from the walk.
#include <gtest/gtest.h>

#include <random>

#include "controller/directory/directory_state.h"
#include "tests/controller/fixtures.h"

namespace kvferry::controller {
namespace {

constexpr std::uint32_t kNumKeys = 400'000;  // so many that the log of keys has several segments

ChunkKey quick_key(std::uint64_t number) {
  ChunkKey key;
  const std::uint64_t words[2] = {number * 0x9e3779b97f4a7c15, ~number * 0xd1342543de82ef95};
  std::memcpy(&key, words, sizeof key);
  return key;
}

std::vector<ChunkKey> quick_keys(std::uint64_t from, std::uint64_t to, std::uint64_t step = 1) {
  std::vector<ChunkKey> keys;
  for (; from < to; from += step) keys.push_back(quick_key(from));
  return keys;
}

std::vector<ChunkEntry> quick_chunks(std::uint64_t from, std::uint64_t to) {
  std::vector<ChunkEntry> chunks;
  for (const ChunkKey& key : quick_keys(from, to)) chunks.push_back({key, 256, false, {}});
  return chunks;
}

/// Records all changes, to apply them to another directory later.
class Later final : public Journal {
 public:
  void joined(NodeId node, const NodeInfo& info, std::uint64_t next_sequence) override {
    told_.push_back([=](DirectoryState& state) { state.replay_joined(node, info, next_sequence); });
  }
  void gone(NodeId node) override {
    told_.push_back([=](DirectoryState& state) { state.replay_gone(node); });
  }
  void published(NodeId node, std::uint64_t sequence, SnapshotMark mark, Tier tier, std::span<const ChunkEntry> chunks,
                 bool is_partial) override {
    told_.push_back([=, kept = std::vector(chunks.begin(), chunks.end())](DirectoryState& state) {
      state.replay_published(node, sequence, mark, tier, kept, is_partial);
    });
  }
  void evicted(NodeId node, std::uint64_t sequence, std::span<const ChunkKey> keys) override {
    told_.push_back([=, kept = std::vector(keys.begin(), keys.end())](DirectoryState& state) {
      state.replay_evicted(node, sequence, kept);
    });
  }
  void snapshot_dropped(NodeId node) override {
    told_.push_back([=](DirectoryState& state) { state.replay_snapshot_dropped(node); });
  }
  std::uint64_t kept_below(NodeId, std::uint64_t) override { return 0; }
  StateStatus status(TimeNs) const override { return {}; }

  void tell(DirectoryState& state) {
    for (const auto& change : told_) change(state);
  }

 private:
  std::vector<std::function<void(DirectoryState&)>> told_;
};

class StateWalk : public ::testing::TestWithParam<unsigned> {
 protected:
  static DirectoryOptions options() { return {.lease_ms = 1'000'000, .index = {.seed = GetParam()}}; }
  void publish(NodeId node, std::vector<ChunkEntry> chunks, Tier tier = Tier::kHost) {
    directory_.publish(node, directory_.repair(node).resend_from, SnapshotMark::kNone, chunks, 0, tier);
  }
  void evict(NodeId node, std::vector<ChunkKey> keys) {
    directory_.evict(node, directory_.repair(node).resend_from, keys, 0);
  }
  NodeId join(const std::string& name) {
    const NodeId node = directory_.join(node_info(name), 0, 0).value().id;
    directory_.publish(node, 0, SnapshotMark::kReplaces, {}, 0);
    return node;
  }

  std::mt19937 random_{GetParam()};
  Directory directory_{options()};
};

TEST_P(StateWalk, MissesNothingWhileKeysComeGoAndWouldMove) {
  const NodeId a = join("a"), b = join("b"), dying = join("dying");
  publish(a, quick_chunks(0, kNumKeys));
  publish(b, quick_chunks(kNumKeys / 2, kNumKeys), Tier::kDisk);
  publish(dying, quick_chunks(0, kNumKeys / 3));
  // Makes all segments sparse. As soon as the table may, it moves the rest of their entries to its end.
  for (std::uint32_t i = 0; i < kNumKeys; i += 8) {
    if (i % 64 == 0) continue;
    for (const NodeId node : {a, b, dying}) evict(node, quick_keys(i + 1, i + 8));
  }

  Later later;
  directory_.set_journal(&later);
  DirectoryState state(directory_);
  const DirectoryImage image = state.image();
  std::vector<std::pair<std::string, TableBlock>> blocks;
  state.begin_walk();
  for (bool goes_on = true; goes_on;) {
    auto& [name_space, block] = blocks.emplace_back();
    goes_on = state.walk(block, name_space);
    directory_.expire(0);  // tidies
    const std::uint32_t from = random_() % kNumKeys;
    switch (random_() % 6) {
      case 0:
        evict(a, quick_keys(from, from + 200));
        break;
      case 1:
        publish(a, quick_chunks(from, from + 200), static_cast<Tier>(random_() % 4));
        break;
      case 2:
        publish(b, quick_chunks(from, from + 50));
        break;
      default:
        break;
    }
    if (blocks.size() == 10) directory_.leave(dying);
    // this node may get the index of the dead node
    if (blocks.size() == 12) publish(join("late"), quick_chunks(0, 1000));
  }
  state.end_walk();
  ASSERT_GT(blocks.size(), 15U);
  for (int i = 0; i < 10'000; ++i) directory_.expire(0);

  Directory reloaded(options());
  DirectoryState reload(reloaded);
  reload.begin_reload(image);
  for (const auto& [name_space, block] : blocks) reload.reload(name_space, block);
  reload.end_blocks();
  later.tell(reload);
  reload.finish(0);
  directory_.set_journal(nullptr);

  ASSERT_EQ(reloaded.num_nodes(), 3U);
  EXPECT_EQ(reloaded.num_chunks(), directory_.num_chunks());
  EXPECT_GT(reloaded.index_version(), directory_.index_version());
  const NodeId probe = directory_.join(node_info("probe"), 0, 0).value().id;
  const NodeId other = reloaded.join(node_info("probe"), 0, 0).value().id;
  for (std::uint32_t i = 0; i < kNumKeys; i += 3) {
    const LookupQuery query{{quick_key(i)}, {}, {}};
    std::map<std::string, Tier> expected, found;
    const auto holders = directory_.lookup(probe, query, 0).value();
    const auto holders_reloaded = reloaded.lookup(other, query, 0).value();
    for (const Holder& holder : holders) expected[holder.engine_id.value] = holder.tier;
    for (const Holder& holder : holders_reloaded) {
      found[holder.engine_id.value] = holder.tier;
      ASSERT_FALSE(holder.confirmed);
    }
    ASSERT_EQ(found, expected) << "key " << i;
  }
}

TEST_P(StateWalk, MissesNothingThatWouldMoveToWhereItHasBeen) {
  // a segment has about 100,000 keys
  constexpr std::uint32_t kNum = 1'000'000, kThinBegin = 600'000, kThinEnd = 900'000;
  const NodeId a = join("a");
  publish(a, quick_chunks(0, kNum));
  evict(a, quick_keys(0, 300'000));  // empties whole segments at the beginning of the log, which are then used again
  DirectoryState state(directory_);
  const DirectoryImage image = state.image();
  std::vector<std::pair<std::string, TableBlock>> blocks;
  state.begin_walk();
  for (bool goes_on = true; goes_on;) {
    auto& [name_space, block] = blocks.emplace_back();
    goes_on = state.walk(block, name_space);
    if (blocks.size() != 10) continue;
    // more keys than the last segment can take, so the first segments are filled again
    publish(a, quick_chunks(kNum, kNum + 150'000));
    for (std::uint32_t i = kThinBegin; i < kThinEnd; i += 64) evict(a, quick_keys(i + 1, i + 64));
    for (int i = 0; i < 3000; ++i) directory_.expire(0);  // tidies
  }
  state.end_walk();

  Directory reloaded(options());
  DirectoryState reload(reloaded);
  reload.begin_reload(image);
  for (const auto& [name_space, block] : blocks) reload.reload(name_space, block);
  reload.end_blocks();
  reload.finish(0);
  const NodeId probe = reloaded.join(node_info("probe"), 0, 0).value().id;
  for (std::uint32_t i = kThinBegin; i < kThinEnd; i += 64)
    ASSERT_EQ(reloaded.lookup(probe, {{quick_key(i)}, {}, {}}, 0).value().size(), 1U) << "key " << i;
}

TEST(DirectoryState, ADamagedImageThatHasANodeTwiceReloadsItOnce) {
  Directory directory;
  ASSERT_TRUE(directory.join(node_info("a"), 0, 0));
  DirectoryImage image = DirectoryState(directory).image();
  NodeImage of_same_id = image.nodes.at(0), of_same_name = image.nodes.at(0);
  of_same_id.info.engine_id.value = "b";
  of_same_name.id.value += 1;
  image.nodes.push_back(of_same_id);
  image.nodes.push_back(of_same_name);

  Directory reloaded;
  DirectoryState state(reloaded);
  state.begin_reload(image);
  state.begin_reload(image);
  state.end_blocks();
  state.finish(0);
  const DirectoryImage again = state.image();
  ASSERT_EQ(again.nodes.size(), 1U);
  EXPECT_EQ(again.nodes[0].info.engine_id.value, "a");
  EXPECT_TRUE(reloaded.join(node_info("b"), 0, 0));
  EXPECT_EQ(state.image().nodes.size(), 2U);
}

INSTANTIATE_TEST_SUITE_P(Seeds, StateWalk, ::testing::Range(1U, 5U));

}  // namespace
}  // namespace kvferry::controller
