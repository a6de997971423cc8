#include "controller/directory/pairing.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "controller/directory/directory.h"
#include "tests/controller/fixtures.h"

namespace kvferry::controller {
namespace {

using ::testing::HasSubstr;

PairNode node(const std::string& name, const std::string& role, std::uint64_t num_cached = 0, std::uint64_t load = 0) {
  return {.engine_id = name,
          .role = role,
          .serves = "http://" + name,
          .endpoint = "tcp://" + name,
          .load = load,
          .num_cached = num_cached};
}

class PairingTest : public ::testing::Test {
 protected:
  Pair choose() {
    std::vector<PairNode> nodes = nodes_;
    const Result<Pair> pair = pairing_.choose(query_, nodes);
    EXPECT_TRUE(pair) << pair.error().what;
    return pair ? *pair : Pair{};
  }
  /// Returns the engine ids of the prefill and of the decode node.
  std::pair<std::string, std::string> names() {
    const Pair pair = choose();
    return {nodes_[pair.prefill].engine_id, nodes_[pair.decode].engine_id};
  }
  std::string refusal() {
    std::vector<PairNode> nodes = nodes_;
    const Result<Pair> pair = pairing_.choose(query_, nodes);
    EXPECT_FALSE(pair);
    return pair ? "" : pair.error().what;
  }
  /// Sends new loads to the directory. From then on, earlier choices are no longer added to the loads.
  void tell_loads() {
    for (PairNode& each : nodes_) ++each.load_reported_at;
  }

  Pairing pairing_;
  PairQuery query_{.name_space = "default", .num_tokens = 1024};
  std::vector<PairNode> nodes_;
};

TEST_F(PairingTest, EqualNodesShare) {
  nodes_ = {node("p0", "kv_producer"), node("p1", "kv_producer"), node("p2", "kv_producer"), node("d0", "kv_consumer"),
            node("d1", "kv_consumer")};
  std::map<std::string, int> times;
  for (int i = 0; i < 12; ++i) {
    tell_loads();
    const auto [prefill, decode] = names();
    ++times[prefill];
    ++times[decode];
  }
  EXPECT_EQ(times, (std::map<std::string, int>{{"p0", 4}, {"p1", 4}, {"p2", 4}, {"d0", 6}, {"d1", 6}}));
}

TEST_F(PairingTest, ABurstBetweenTwoHeartbeatsIsShared) {
  nodes_ = {node("p0", "kv_producer", 0, 2), node("p1", "kv_producer"), node("d0", "kv_consumer", 0, 4),
            node("d1", "kv_consumer")};
  std::map<std::string, int> times;
  for (int i = 0; i < 6; ++i) {
    const auto [prefill, decode] = names();
    ++times[prefill];
    ++times[decode];
  }
  EXPECT_EQ(times, (std::map<std::string, int>{{"p0", 2}, {"p1", 4}, {"d0", 1}, {"d1", 5}}));
}

TEST_F(PairingTest, WhoHoldsMoreOfThePromptPrefillsItUntilItIsTooBusy) {
  nodes_ = {node("p0", "kv_producer"), node("p1", "kv_producer", 768), node("d0", "kv_consumer")};
  for (int i = 0; i < 4; ++i) {
    tell_loads();
    EXPECT_EQ(names().first, "p1");
  }
  nodes_[1].load = 1;  // one request in the queue costs less than 768 tokens
  tell_loads();
  EXPECT_EQ(names().first, "p1");
  nodes_[1].load = 2;
  tell_loads();
  EXPECT_EQ(names().first, "p0");
}

TEST_F(PairingTest, ADecodeNodeThatHasNearlyAllNeedsNoPrefill) {
  nodes_ = {node("p0", "kv_producer"), node("d0", "kv_consumer"), node("d1", "kv_consumer", 1024 - kSkipTokensMax)};
  EXPECT_TRUE(choose().skip_prefill);
  tell_loads();
  EXPECT_EQ(names().second, "d1");
  nodes_[2].num_cached -= 1;
  tell_loads();
  EXPECT_FALSE(choose().skip_prefill);
  query_.num_tokens = 20;  // a short prompt is prefilled even if no node has any of it
  nodes_[2].num_cached = 0;
  tell_loads();
  EXPECT_FALSE(choose().skip_prefill);
}

TEST_F(PairingTest, WhatTheAskerKnowsOfALoadCountsWhereItIsMore) {
  nodes_ = {node("p0", "kv_producer"), node("p1", "kv_producer", 0, 1), node("d0", "kv_consumer")};
  query_.loads = {{"p0", 2}, {"p1", 0}};
  EXPECT_EQ(names().first, "p1");
}

TEST_F(PairingTest, DrainingExcludedAndSilentNodesGetNothing) {
  nodes_ = {node("p0", "kv_producer"), node("p1", "kv_producer", 1024), node("p2", "kv_producer", 1024),
            node("p3", "kv_producer", 1024), node("d0", "kv_consumer")};
  nodes_[1].is_leaving = true;
  nodes_[2].serves.clear();
  query_.exclude = {"p3"};
  EXPECT_EQ(names().first, "p0");
  nodes_.erase(nodes_.begin());
  EXPECT_EQ(
      refusal(),
      "no prefill node (kv_producer or kv_both) of namespace 'default' accepts requests: 3 registered, 1 draining, "
      "1 excluded by the caller, 1 without the setting 'serves', the URL for routers");
  nodes_ = {node("p0", "kv_producer")};
  EXPECT_THAT(refusal(), HasSubstr("no decode node (kv_consumer or kv_both) of namespace 'default'"));
  nodes_.clear();
  EXPECT_THAT(refusal(), HasSubstr("0 registered"));
}

TEST_F(PairingTest, NodesOfBothKindsAreEither) {
  nodes_ = {node("a", "kv_both")};
  Pair pair = choose();
  EXPECT_TRUE(pair.skip_prefill);
  nodes_ = {node("a", "kv_both"), node("b", "kv_both")};
  for (int i = 0; i < 4; ++i) {
    tell_loads();
    pair = choose();
    EXPECT_NE(pair.prefill, pair.decode);
    EXPECT_FALSE(pair.skip_prefill);
  }
  nodes_.push_back(node("other", "kv_unheard_of", 1024));
  EXPECT_NE(choose().decode, 2u);
}

TEST(PromptKeys, AreThoseThatTheDirectoryIsAskedFor) {
  std::vector<std::int32_t> tokens(4 * 32 + 20);
  std::iota(tokens.begin(), tokens.end(), 5);
  const ChunkKey root = root_key("model=a chunk_tokens=32", "");
  const PromptKeys prompt = keys_of_prompt(root, 32, tokens);
  ASSERT_EQ(prompt.keys.size(), 4u);
  ASSERT_EQ(prompt.tail_groups.size(), 5u);
  const std::span<const std::int32_t> all(tokens);
  ChunkKey parent = root;
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(prompt.tail_groups[i], tail_group_key(parent, all.subspan(32 * i)));
    parent = chunk_key(parent, all.subspan(32 * i, 32));
    EXPECT_EQ(prompt.keys[i], parent);
  }
  EXPECT_EQ(prompt.rest_parent, parent);
  EXPECT_EQ(keys_of_prompt(root, 32, all.first(15)).tail_groups.size(), 0u);
  EXPECT_EQ(keys_of_prompt(root, 32, {}).keys.size(), 0u);
}

TEST(PromptKeys, ExtrasAreSpelledAsTheConnectorDoes) {
  EXPECT_EQ(request_extras("", "", "", ""), "");
  EXPECT_EQ(request_extras("sql", "/l/sql", "", ""), "lora=sql@/l/sql");
  EXPECT_EQ(request_extras("", "", "", "x"), "salt=x");
  EXPECT_EQ(request_extras("", "", "2@blue", ""), "epoch=2@blue");
  EXPECT_EQ(request_extras("sql", "/l/sql", "", "x"), "lora=sql@/l/sql;salt=x");
  EXPECT_EQ(request_extras("sql", "/l/sql", "1", "x"), "lora=sql@/l/sql;epoch=1;salt=x");
}

TEST(DirectoryForRouters, HoldersAreFoundWithoutBeingANode) {
  Directory directory;
  const NodeId a = directory.join(node_info("a", 1, "default"), 0, 0)->id;
  directory.publish(a, 0, SnapshotMark::kNone, full_chunks(0, 3), 0);
  std::vector<HolderView> found;
  const LookupQuery query{keys_of(0, 4), {}, {}};
  directory.find_holders("default", query, found);
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0].num_full_chunks, 3u);
  directory.find_holders("nowhere", query, found);
  EXPECT_TRUE(found.empty());
  EXPECT_EQ(directory.fingerprint_of("default"), "model=a");
  EXPECT_EQ(directory.fingerprint_of("nowhere"), "");
}

TEST(DirectoryForRouters, LoadsAreKnownUntilTheNodeGoes) {
  Directory directory;
  const NodeId a = directory.join(node_info("a"), 0, 0)->id;
  EXPECT_EQ(directory.node(a)->load, 0u);
  directory.set_load(a, 7, 3);
  EXPECT_EQ(directory.node(a)->load, 7u);
  EXPECT_EQ(directory.node(a)->load_reported_at, 3);
  EXPECT_EQ(directory.status(5)[0].load, 7u);
  directory.leave(a);
  EXPECT_EQ(directory.node(a), nullptr);
}

}  // namespace
}  // namespace kvferry::controller
