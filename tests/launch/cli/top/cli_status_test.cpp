// Tests `kvferry status` with a controller that has nodes. check_cli.py has the tests that need no nodes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <nlohmann/json.hpp>

#include "controller/http/http_views.h"
#include "tests/controller/live.h"

namespace kvferry::controller {
namespace {

using ::testing::ContainsRegex;

std::string output_of(const std::string& arguments) {
  std::string output;
  std::FILE* pipe = ::popen((KVFERRY_BINARY " " + arguments).c_str(), "r");
  for (int c = std::fgetc(pipe); c != EOF; c = std::fgetc(pipe)) output += static_cast<char>(c);
  EXPECT_EQ(::pclose(pipe), 0);
  return output;
}

NodeInfo node_on(const std::string& host, const std::string& engine_id, std::uint64_t incarnation) {
  NodeInfo info = node_info(engine_id, incarnation);
  info.details.host = host;
  return info;
}

class CliStatus : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(a_.wait_for<Registered>());
    ASSERT_TRUE(b_.wait_for<Registered>());
    b_.hold(full_chunks(0, 3));
    b_.hold({tail_chunk(10, 50)});
    ASSERT_TRUE(a_.wait_to_see(ask_for(0, 3), {"prefill-b:3"}));
    ASSERT_TRUE(a_.wait_until([&] { return server_.status().nodes.at(1).num_chunks == 4; }));
  }
  LiveServer server_{"tcp://127.0.0.1:0"};
  LiveNode a_{server_.endpoint(), node_info("decode-a", 7)};
  LiveNode b_{server_.endpoint(), node_on("pod-b", "prefill-b", 8)};
};

TEST_F(CliStatus, TableHasALineForEachNode) {
  const std::string table = output_of("status --controller " + server_.endpoint());
  EXPECT_THAT(table, ContainsRegex("ENGINE +INCARNATION +ROLE +VERSION +ENDPOINT +SERVES +LOAD +CHUNKS +LAST MESSAGE"));
  EXPECT_THAT(table, ContainsRegex("decode-a +7 +kv_both +[0-9.]+ +tcp://10.0.0.1:1 +- +0 +0 +[0-9.]+ s ago\n"));
  EXPECT_THAT(table, ContainsRegex("prefill-b +8 +kv_both +[0-9.]+ +tcp://10.0.0.1:1 +- +0 +4 +[0-9.]+ s ago\n"));
  EXPECT_THAT(table, ContainsRegex("lookups: [1-9]"));
}

TEST_F(CliStatus, JsonHasTheSameForMachines) {
  const nlohmann::json status = nlohmann::json::parse(output_of("status --json --controller " + server_.endpoint()));
  ASSERT_EQ(status.at("nodes").size(), 2U);
  const nlohmann::json& node = status.at("nodes").at(1);
  EXPECT_EQ(node.at("engine_id"), "prefill-b");
  EXPECT_EQ(node.at("incarnation"), 8);
  EXPECT_EQ(node.at("role"), "kv_both");
  EXPECT_EQ(node.at("chunks"), 4);
  EXPECT_EQ(node.at("tails"), 1);
  EXPECT_EQ(node.at("host"), "pod-b");
  EXPECT_EQ(nodes_json(server_.status()).at("nodes").at(1).at("host"), "pod-b") << "routers see it too";
  EXPECT_TRUE(node.at("heartbeat_age_ms").is_number_unsigned());
  EXPECT_GE(status.at("counters").at("lookups"), 1);
}

}  // namespace
}  // namespace kvferry::controller
