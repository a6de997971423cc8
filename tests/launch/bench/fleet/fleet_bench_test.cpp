// Tests `kvferry bench fleet`: its flags, its load, and that a small fleet reports every figure that the help promises.
#include "launch/bench/fleet/fleet_bench.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "launch/bench/fleet/fleet_load.h"

namespace kvferry::bench {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;

TEST(FleetBench, RefusesBadFlagsAndSaysWhatIsAllowed) {
  struct Row {
    FleetFlags flags;
    const char* reason;
  };
  const Row rows[] = {
      {{.nodes = "3"}, "--nodes is '3'; allowed: a whole number from 4 to 100000"},
      {{.nodes = ""}, "--nodes is ''; allowed: a whole number from 4 to 100000"},
      {{.nodes = "250,1k"}, "--nodes is '1k'; allowed: a whole number from 4 to 100000"},
      {{.nodes = "100000"}, "--nodes is '100000', but this process may open"},
      {{.nodes = "100000"}, "and each node takes up to 5"},
      {{.nodes = "100000", .over = "stream"}, "and each node takes up to 3"},
      {{.nodes = "100000", .replicas = "3", .over = "stream"}, "and each node takes up to 7"},
      {{.replicas = "2"}, "--replicas is '2'; allowed: 1, 3"},
      {{.over = "udp"}, "--over is 'udp'; allowed: zmq, stream"},
      {{.seconds = "0"}, "--seconds is '0'; allowed: a whole number from 1 to 600"},
      {{.chunks = "607"}, "--chunks is '607'; allowed: a whole number from 608 to 1000000"},
      {{.stores = "-1"}, "--stores is '-1'; allowed: a whole number from 0 to 10000"},
      {{.lookups = "2,x"}, "--lookups is 'x'; allowed: a whole number from 0 to 10000"},
      {{.json_file = "/no/folder/x"}, "--json is '/no/folder/x'"},
      {{.plot_file = "x.jpg"}, "--plot is 'x.jpg'; allowed: a file"},
  };
  for (const Row& row : rows) {
    const Result<void> done = run_fleet_bench(row.flags);
    ASSERT_FALSE(done) << row.reason;
    EXPECT_EQ(done.error().code, ErrorCode::kInvalidArgument) << row.reason;
    EXPECT_THAT(done.error().what, HasSubstr(row.reason));
  }
}

TEST(FleetLoad, ANodeHoldsWhatItStoredAndDidNotEvict) {
  HeldConversations held(3, 5);
  std::vector<controller::ChunkEntry> all;
  held.all(all);
  std::set<ChunkKey> keys;
  for (const controller::ChunkEntry& chunk : all) keys.insert(chunk.key);
  ASSERT_EQ(keys.size(), all.size()) << "a chunk twice";
  EXPECT_EQ(keys.size(), kSystemPrompts * kSystemChunks + 5 * kOwnChunks);
  std::vector<ChunkKey> asked;
  for (int i = 0; i < 1000; ++i) {
    const ChunkKey evicted = held.evict();
    EXPECT_EQ(keys.erase(evicted), 1U) << "evicts what it does not hold, at " << i;
    EXPECT_TRUE(keys.insert(held.store().key).second) << "stores what it holds, at " << i;
    for (const Conversation& conversation : {held.whole(static_cast<std::uint64_t>(i)), held.lonely()}) {
      conversation.keys(asked);
      ASSERT_EQ(asked.size(), kConversationChunks);
      for (const ChunkKey& key : asked) ASSERT_TRUE(keys.contains(key)) << "asks for what is not whole, at " << i;
    }
  }
  held.all(all);
  EXPECT_EQ(std::set<ChunkKey>(keys).size(), all.size());
  for (const controller::ChunkEntry& chunk : all) EXPECT_TRUE(keys.contains(chunk.key));
}

TEST(FleetLoad, NeighboursShareEveryFourthConversationAndAllTheirSystemPrompts) {
  std::vector<ChunkKey> first, second, other;
  for (std::uint64_t number = 0; number < 8; ++number) {
    Conversation{4, number}.keys(first);
    Conversation{5, number}.keys(second);
    Conversation{6, number}.keys(other);
    EXPECT_TRUE(std::equal(first.begin(), first.begin() + kSystemChunks, other.begin()));
    EXPECT_EQ(first == second, number % 4 == 0) << number;
    EXPECT_NE(first, other);
  }
}

nlohmann::json small_run(FleetFlags flags) {
  const std::string file = testing::TempDir() + "fleet_bench." + std::to_string(::getpid()) + ".json";
  flags.nodes = "50";
  flags.seconds = "2";
  flags.json_file = file;
  const Result<void> done = run_fleet_bench(flags);
  EXPECT_TRUE(done) << done.error().what;
  if (!done) return {};
  const nlohmann::json figures = nlohmann::json::parse(std::ifstream(file));
  ::unlink(file.c_str());
  return figures["rows"][0];
}

void expect_figures(const nlohmann::json& row, std::vector<const char*> more) {
  more.insert(more.end(), {"register_s", "told_s", "messages_in_per_s", "messages_out_per_s", "lookups_per_s",
                           "lookup_us_p50", "lookup_us_p99", "controller_cores", "controller_rss_mib", "bench_cores",
                           "dead_noticed_s_p50", "dead_noticed_s_max", "rolling_s", "rolling_lookup_us_p99"});
  for (const char* name : more) {
    ASSERT_TRUE(row.contains(name)) << name << " in " << row.dump();
    EXPECT_GT(row[name].get<double>(), 0) << name;
  }
  EXPECT_EQ(row["nodes"], 50);
  EXPECT_EQ(row["wrong_answers"], 0);
  EXPECT_EQ(row["nodes_expired"], 0) << "a living node was taken for dead";
  // A node has 16 conversations, whose common system prompts count once. Every node has as many chunks as at the start.
  EXPECT_NEAR(row["chunks"].get<double>(), 50.0 * 1928, 50.0 * 20);
  // The lease is 2.5 s, and the dead node's last heartbeat may have been sent just before its death.
  EXPECT_GT(row["dead_noticed_s_max"].get<double>(), 1.5);
}

TEST(FleetBench, ASmallFleetGivesEveryFigure) {
  for (const char* over : {"zmq", "stream"}) {
    const nlohmann::json row = small_run({.over = over});
    ASSERT_FALSE(row.is_null());
    EXPECT_EQ(row["over"], over);
    expect_figures(row, {"restart_register_s"});
  }
}

TEST(FleetBench, ThreeControllersGoOnWithTwo) {
  if (std::system("command -v etcd redis-server >/dev/null 2>&1") != 0) GTEST_SKIP() << "etcd or redis-server missing";
  const nlohmann::json row = small_run({.replicas = "3"});
  ASSERT_FALSE(row.is_null());
  EXPECT_EQ(row["replicas"], 3);
  expect_figures(row, {});
  EXPECT_LT(row["failover_s"].get<double>(), 5.0);
}

}  // namespace
}  // namespace kvferry::bench
