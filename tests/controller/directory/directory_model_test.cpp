// Compares the directory with a model that is so simple that a reader can see that it is right: it answers every
// question by a search through everything. The seed of a failing run is in the test's name.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>

#include "controller/directory/directory.h"
#include "tests/controller/fixtures.h"

namespace kvferry::controller {
namespace {

constexpr std::uint32_t kNumEngines = 6;
constexpr std::uint32_t kNumKeys = 24;
constexpr std::uint32_t kNumTails = 60;  // tails have the numbers 1000 ...; tail t is in group 2000 + t % 3
constexpr std::uint32_t kNumGroups = 3;
constexpr std::size_t kTailsPerGroupMax = 25;
constexpr int kNumSteps = 3000;

struct ModelTail {
  std::string node;
  std::uint32_t number;
};
struct ModelNode {
  std::uint64_t incarnation = 0;
  NodeId id;
  TimeNs heard_at = 0;
  std::uint64_t sequence = 0;  // sequence number of the node's next message
  std::vector<bool> full = std::vector<bool>(kNumKeys);
  std::vector<bool> tails = std::vector<bool>(kNumTails);
};

class DirectoryModel : public ::testing::TestWithParam<unsigned> {
 protected:
  std::uint32_t draw(std::uint32_t end) { return std::uniform_int_distribution<std::uint32_t>(0, end - 1)(random_); }
  static std::string space_of(const std::string& name) { return name.back() % 2 == 0 ? "even" : "odd"; }

  void drop(const std::string& name) {
    nodes_.erase(name);
    for (std::vector<ModelTail>& group : groups_)
      std::erase_if(group, [&](const ModelTail& tail) { return tail.node == name; });
  }
  void clear(const std::string& name) {
    ModelNode kept = nodes_[name];
    drop(name);
    std::fill(kept.full.begin(), kept.full.end(), false);
    std::fill(kept.tails.begin(), kept.tails.end(), false);
    nodes_[name] = kept;
  }
  /// The size of a group is limited in each namespace. The model keeps both namespaces in one list, and counts only the
  /// tails of the node's own namespace.
  void publish_tail(const std::string& name, std::uint32_t number) {
    std::vector<ModelTail>& group = groups_[number % kNumGroups];
    std::erase_if(group, [&](const ModelTail& tail) { return tail.node == name && tail.number == number; });
    group.push_back({name, number});
    const auto mine = [&](const ModelTail& tail) { return tail.node == name; };
    const auto ours = [&](const ModelTail& tail) { return space_of(tail.node) == space_of(name); };
    if (std::count_if(group.begin(), group.end(), mine) > 16)
      group.erase(std::find_if(group.begin(), group.end(), mine));
    if (std::count_if(group.begin(), group.end(), ours) > static_cast<std::ptrdiff_t>(kTailsPerGroupMax))
      group.erase(std::find_if(group.begin(), group.end(), ours));
    nodes_[name].tails[number] = true;
  }

  void join(const std::string& name) {
    const auto known = nodes_.find(name);
    const std::uint64_t incarnation = 1 + (known == nodes_.end() ? draw(5) : known->second.incarnation + draw(3) - 1);
    const bool again = known != nodes_.end() && known->second.incarnation == incarnation;
    const std::uint64_t sequence = again ? known->second.sequence : draw(10);
    const Result<Joined> joined = directory_.join(node_info(name, incarnation, space_of(name)), sequence, now_);
    if (known != nodes_.end() && incarnation < known->second.incarnation) {
      ASSERT_FALSE(joined);
      return;
    }
    ASSERT_TRUE(joined) << joined.error().what;
    ASSERT_EQ(joined->snapshot_wanted, !again);
    if (again) {
      known->second.heard_at = now_;
      return;
    }
    drop(name);
    nodes_[name] = ModelNode{.incarnation = incarnation, .id = joined->id, .heard_at = now_, .sequence = sequence};
    snapshot(name);  // sends the snapshot at once, so that no snapshot is ever due
  }
  void snapshot(const std::string& name) {
    clear(name);
    ModelNode& node = nodes_[name];
    ASSERT_EQ(directory_.publish(node.id, node.sequence++, SnapshotMark::kReplaces, {}, now_), Update::kApplied);
    node.heard_at = now_;
  }
  void publish(const std::string& name) {
    ModelNode& node = nodes_[name];
    std::vector<ChunkEntry> chunks;
    for (std::uint32_t i = draw(kNumKeys), end = i + draw(kNumKeys - i); i < end; ++i) {
      chunks.push_back({key_of(i), 256, false, {}});
      node.full[i] = true;
    }
    for (std::uint32_t i = draw(4); i > 0; --i) {
      const std::uint32_t tail = draw(kNumTails);
      chunks.push_back(tail_chunk(1000 + tail, 2000 + tail % kNumGroups));
      publish_tail(name, tail);
    }
    ASSERT_EQ(directory_.publish(node.id, node.sequence++, SnapshotMark::kNone, chunks, now_), Update::kApplied);
    node.heard_at = now_;
  }
  void evict(const std::string& name) {
    ModelNode& node = nodes_[name];
    std::vector<ChunkKey> keys;
    for (int i = 0; i < 3; ++i) {
      const std::uint32_t full = draw(kNumKeys);
      const std::uint32_t tail = draw(kNumTails);
      keys.insert(keys.end(), {key_of(full), key_of(1000 + tail)});
      node.full[full] = false;
      node.tails[tail] = false;
      std::erase_if(groups_[tail % kNumGroups],
                    [&](const ModelTail& other) { return other.node == name && other.number == tail; });
    }
    ASSERT_EQ(directory_.evict(node.id, node.sequence++, keys, now_), Update::kApplied);
    node.heard_at = now_;
  }
  void expire() {
    std::vector<NodeId> expected;
    for (const auto& [name, node] : nodes_) {
      if (now_ - node.heard_at > DirectoryOptions{}.lease_ms * kMillisecond) expected.push_back(node.id);
    }
    std::vector<NodeId> expired = directory_.expire(now_);
    std::sort(expected.begin(), expected.end());
    std::sort(expired.begin(), expired.end());
    ASSERT_EQ(expired, expected);
    std::vector<std::string> names;
    for (const auto& [name, node] : nodes_) {
      if (std::binary_search(expected.begin(), expected.end(), node.id)) names.push_back(name);
    }
    for (const std::string& name : names) drop(name);
  }
  void lookup(const std::string& asker) {
    LookupQuery query;
    const std::uint32_t from = draw(kNumKeys);
    const std::uint32_t to = from + draw(kNumKeys - from);
    query.keys = keys_of(from, to);
    const std::uint32_t exact = draw(kNumTails);
    query.exact_tails = {key_of(1000 + exact)};
    for (std::uint32_t i = draw(kNumGroups + 1); i < kNumGroups; ++i) query.tail_groups.push_back(key_of(2000 + i));
    const std::uint32_t group_offset = kNumGroups - static_cast<std::uint32_t>(query.tail_groups.size());
    nodes_[asker].heard_at = now_;

    std::vector<std::tuple<std::int64_t, TimeNs, std::string, std::vector<ChunkKey>>> expected;
    for (const auto& [name, node] : nodes_) {
      if (name == asker || space_of(name) != space_of(asker)) continue;
      std::uint32_t n = 0;
      while (from + n < to && node.full[from + n]) ++n;
      std::vector<ChunkKey> tails;
      if (node.tails[exact]) tails.push_back(key_of(1000 + exact));
      for (std::size_t i = query.tail_groups.size(); i-- > n;) {
        const std::vector<ModelTail>& group = groups_[group_offset + i];
        for (auto tail = group.rbegin(); tail != group.rend(); ++tail) {
          if (tail->node == name && tail->number != exact && tails.size() < 16)
            tails.push_back(key_of(1000 + tail->number));
        }
      }
      if (n > 0 || !tails.empty()) expected.emplace_back(-std::int64_t{n}, -node.heard_at, name, tails);
    }
    std::sort(expected.begin(), expected.end());
    const Result<std::vector<Holder>> holders = directory_.lookup(nodes_[asker].id, query, now_);
    ASSERT_TRUE(holders);
    ASSERT_EQ(holders->size(), expected.size());
    for (std::size_t i = 0; i < expected.size(); ++i) {
      const auto& [minus_full, minus_heard_at, name, tails] = expected[i];
      const Holder& holder = (*holders)[i];
      ASSERT_EQ(holder.engine_id.value, name);
      ASSERT_EQ(holder.incarnation.value, nodes_[name].incarnation);
      ASSERT_EQ(-std::int64_t{holder.num_full_chunks}, minus_full);
      std::vector<ChunkKey> got;
      for (const ChunkEntry& tail : holder.tails) got.push_back(tail.key);
      ASSERT_EQ(got, tails);
    }
    num_holders_seen_ += holders->size();
  }
  void check_totals() {
    std::size_t num_chunks = 0;
    for (const auto& [name, node] : nodes_)
      num_chunks += static_cast<std::size_t>(std::count(node.full.begin(), node.full.end(), true) +
                                             std::count(node.tails.begin(), node.tails.end(), true));
    ASSERT_EQ(directory_.num_chunks(), num_chunks);
    ASSERT_EQ(directory_.num_nodes(), nodes_.size());
  }

  void step() {
    now_ += draw(300) * kMillisecond;
    const std::string name = fmt::format("engine{}", draw(kNumEngines));
    const bool alive = nodes_.contains(name);
    const std::uint32_t dice = draw(100);
    if (!alive || dice < 4) return join(name);
    if (dice < 7) {
      ASSERT_TRUE(directory_.leave(nodes_[name].id));
      return drop(name);
    }
    if (dice < 9) return snapshot(name);
    if (dice < 45) return publish(name);
    if (dice < 60) return evict(name);
    return lookup(name);
  }

  std::mt19937 random_{GetParam()};
  // With every other seed, the directory can share only few sets.
  Directory directory_{{.tails_per_group_max = kTailsPerGroupMax,
                        .index = {.seed = GetParam(), .shared_sets_max = GetParam() % 2 == 0 ? 4U : 65536U}}};
  TimeNs now_ = kSecond;
  std::map<std::string, ModelNode> nodes_;
  std::vector<ModelTail> groups_[kNumGroups];
  std::size_t num_holders_seen_ = 0;
};

TEST_P(DirectoryModel, AnswersAsTheModelDoes) {
  for (int i = 0; i < kNumSteps; ++i) {
    step();
    if (HasFatalFailure()) FAIL() << "step " << i;
    expire();
    check_totals();
    if (HasFatalFailure()) FAIL() << "step " << i;
  }
  EXPECT_GT(num_holders_seen_, 500U) << "the run asked nothing worth asking";
}

INSTANTIATE_TEST_SUITE_P(Seeds, DirectoryModel, ::testing::Range(1U, 41U));

}  // namespace
}  // namespace kvferry::controller
