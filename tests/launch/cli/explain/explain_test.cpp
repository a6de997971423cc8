// Tests `kvferry explain` with two real nodes and a real controller.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <thread>

#include "tests/launch/cli/hand_over.h"

namespace kvferry {
namespace {

using ::testing::HasSubstr;
using Json = nlohmann::json;

std::string command(const TestController& controller, const std::string& request) {
  return "explain " + request + " --controller " + controller.endpoint();
}

Json explained(const std::string& arguments) {
  const Output output = run_kvferry(arguments + " --json");
  EXPECT_EQ(output.status, 0) << output.text;
  return Json::parse(output.text, nullptr, false);
}

/// Sleeps for longer than the error of times of two nodes on a busy host, which is milliseconds: what one of them did
/// before is ordered before what the other one did after it.
void sleep_beyond_clock_error() { std::this_thread::sleep_for(std::chrono::milliseconds(200)); }

TEST(Explain, TellsARequestsLifeOnBothNodes) {
  const TestController controller;
  TestNode prefill(controller.endpoint(), "prefill"), decode(controller.endpoint(), "decode");
  hand_over(prefill, decode, "6f1a", 20, sleep_beyond_clock_error);
  hand_over(prefill, decode, "other", 20);
  const Json told = explained(command(controller, "6f1a"));
  ASSERT_EQ(told["lives"].size(), 2u) << told.dump(2);
  EXPECT_EQ(told["lives"][0]["node"], "prefill");
  EXPECT_EQ(told["lives"][1]["node"], "decode");
  EXPECT_EQ(told["recomputed"], Json::array());
  EXPECT_EQ(told["missing"], Json::array());
  EXPECT_EQ(told["clocks"].size(), 1u) << "both nodes have one clock, so there is only the accuracy: "
                                       << told["clocks"];
  double sum = 0;
  for (const Json& part : told["parts"]) sum += part["ms"].get<double>();
  EXPECT_NEAR(sum, told["duration_ms"].get<double>(), 0.05 * told["duration_ms"].get<double>());
  const Json events = told["lives"][1]["events"];
  const auto pulled = std::ranges::find_if(events, [](const Json& one) { return one["event"] == "pulled"; });
  ASSERT_NE(pulled, events.end()) << told.dump(2);
  EXPECT_EQ((*pulled)["chunks"], 3);
  EXPECT_EQ((*pulled)["failed"], 0);
  EXPECT_EQ((*pulled)["bytes"], 21 * 2 * TestNode::kLayers * TestNode::kHeads * TestNode::kDim * sizeof(float));
  EXPECT_NE((*pulled)["path"], "");
  EXPECT_GT((*pulled)["duration_ms"], 0);
  const Output text = run_kvferry(command(controller, "cmpl-6f1a-0-22222222"));
  EXPECT_THAT(text.text, HasSubstr("prefill (kv_both), request cmpl-6f1a-0-11111111")) << "the hand-off names it";
  EXPECT_THAT(text.text, HasSubstr("computed again: nothing"));
}

TEST(Explain, NamesTheCauseWhenTheHolderIsGone) {
  const TestController controller;
  auto prefill = std::make_unique<TestNode>(controller.endpoint(), "prefill");
  TestNode decode(controller.endpoint(), "decode");
  hand_over(*prefill, decode, "6f1a", 0, [&] { prefill.reset(); });
  const Json told = explained(command(controller, "6f1a"));
  ASSERT_EQ(told["recomputed"].size(), 1u) << told.dump(2);
  EXPECT_EQ(told["recomputed"][0]["tokens"], 20);
  EXPECT_THAT(told["recomputed"][0]["cause"].get<std::string>(), HasSubstr("the other node did not answer in time"));
  ASSERT_EQ(told["missing"].size(), 1u);
  EXPECT_THAT(told["missing"][0].get<std::string>(), HasSubstr("is not registered any more"));
}

TEST(Explain, TellsTheShareOfTheMeasuredLimitOnceThePathIsMeasured) {
  const TestController controller;
  TestNode prefill(controller.endpoint(), "prefill"), decode(controller.endpoint(), "decode");
  Json pulled = Json::object();
  for (int i = 0; i < 100 && pulled.value("limit_gb_per_s", 0.0) == 0; ++i) {  // the measurement takes milliseconds
    const std::string id = "again" + std::to_string(i);
    hand_over(
        prefill, decode, id, 20, [] {}, 100 * (i + 1));
    const Json told = explained(command(controller, id));
    for (const Json& life : told["lives"])
      for (const Json& event : life["events"])
        if (event["event"] == "pulled") pulled = event;
  }
  EXPECT_GT(pulled["limit_gb_per_s"], 0.01) << pulled.dump(2);
  EXPECT_GT(pulled["share_of_limit"], 0);
  EXPECT_LE(pulled["share_of_limit"], 1);
}

TEST(Explain, ListsRequestsAndWhatItListsIsFound) {
  const TestController controller;
  TestNode prefill(controller.endpoint(), "prefill"), decode(controller.endpoint(), "decode");
  hand_over(prefill, decode, "6f1a", 20);
  for (const char* order : {"--last", "--slowest"}) {
    const Json listed = explained(fmt::format("explain {} 3 --controller {}", order, controller.endpoint()));
    ASSERT_EQ(listed["requests"].size(), 2u) << listed.dump(2);
    for (const Json& request : listed["requests"])
      EXPECT_EQ(explained(command(controller, request["request"].get<std::string>()))["lives"].size(),
                request["node"] == "decode" ? 2u : 1u);
  }
  const Output text = run_kvferry("explain --slowest 1 --controller " + controller.endpoint());
  EXPECT_THAT(text.text, HasSubstr("RECOMPUTED  REQUEST\n"));
  for (const char* wrong : {"explain", "explain 6f1a --last 3", "explain --last 0", "explain --slowest 17"})
    EXPECT_EQ(run_kvferry(fmt::format("{} --controller {}", wrong, controller.endpoint())).status, 2) << wrong;
}

TEST(Explain, ShowsTheRequestsOfATrace) {
  const TestController controller;
  TestNode prefill(controller.endpoint(), "prefill"), decode(controller.endpoint(), "decode");
  const std::string trace = "0af7651916cd43dd8448eb211c80319c";
  const auto nothing = [] {};
  hand_over(prefill, decode, "6f1a", 20, sleep_beyond_clock_error, 100, trace);
  hand_over(prefill, decode, "other", 20, nothing, 200, "1" + trace.substr(1));
  hand_over(prefill, decode, "untraced", 20, nothing, 300);
  hand_over(prefill, decode, "again", 20, sleep_beyond_clock_error, 400, trace);
  const std::string at = " --controller " + controller.endpoint();
  for (const std::string& asked : {trace, "00-" + trace + "-b7ad6b7169203331-01"}) {
    const Json told = explained("explain --trace " + asked + at);
    EXPECT_EQ(told["trace"], trace);
    ASSERT_EQ(told["requests"].size(), 2u) << told.dump(2);
    for (const Json& request : told["requests"]) {
      ASSERT_EQ(request["lives"].size(), 2u) << request.dump(2);
      EXPECT_EQ(request["lives"][1]["trace"], trace);
      EXPECT_EQ(request["lives"][1]["node"], "decode");
    }
    EXPECT_EQ(told["requests"][0]["request"], "cmpl-6f1a-0-11111111");
  }
  const Output text = run_kvferry("explain --trace " + trace + at);
  EXPECT_THAT(text.text, HasSubstr("trace " + trace + ": 2 requests\n\nrequest cmpl-6f1a-0-11111111: "));
  EXPECT_THAT(text.text, HasSubstr("request cmpl-again-0-22222222, trace " + trace));
  const Output unknown = run_kvferry("explain --trace " + std::string(32, 'a') + at);
  EXPECT_EQ(unknown.status, 1);
  EXPECT_THAT(unknown.text, HasSubstr("kvferry: none of 2 nodes has a request of the trace 'aaaa"));
  for (const std::string& wrong : {trace.substr(1), std::string(32, '0'), trace + "0", "00-" + trace, trace + " 6f1a"})
    EXPECT_EQ(run_kvferry("explain --trace " + wrong + at).status, 2) << wrong;
}

TEST(Explain, WorksWithAClusterKeyAndNotWithoutIt) {
  const std::string key = ::testing::TempDir() + fmt::format("explain-{}.key", ::getpid());
  std::ofstream(key) << std::string(64, 'k');
  ::chmod(key.c_str(), 0600);
  const TestController controller("tcp://127.0.0.1:0", key);
  const std::string setting = R"(, "cluster_key_file": ")" + key + "\"";
  TestNode prefill(controller.endpoint(), "prefill", "toy", setting),
      decode(controller.endpoint(), "decode", "toy", setting);
  hand_over(prefill, decode, "6f1a", 20);
  EXPECT_EQ(explained(command(controller, "6f1a") + " --cluster-key-file " + key)["lives"].size(), 2u);
  EXPECT_EQ(run_kvferry(command(controller, "6f1a")).status, 1);
  std::remove(key.c_str());
}

TEST(Explain, AnUnknownRequestIsOneSentence) {
  const TestController controller;
  const TestNode node(controller.endpoint(), "node");
  const Output output = run_kvferry(command(controller, "nothing"));
  EXPECT_EQ(output.status, 1);
  EXPECT_THAT(output.text, HasSubstr("kvferry: none of 1 nodes has a request 'nothing': the id may be wrong"));
}

}  // namespace
}  // namespace kvferry
