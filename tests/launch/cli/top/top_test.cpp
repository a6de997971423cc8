// Tests what `kvferry top` and `kvferry status` tell of the transfers of two real nodes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>

#include "tests/launch/cli/hand_over.h"

namespace kvferry {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using Json = nlohmann::json;

class Top : public ::testing::Test {
 protected:
  /// Returns the nodes of `kvferry top --json` by name, once each has sent a report after its last event.
  Json nodes(const std::string& more = "") {
    std::this_thread::sleep_for(std::chrono::milliseconds(2000));  // a report a second, with a heartbeat
    const Output output = run_kvferry("top --json " + there_ + more);
    EXPECT_EQ(output.status, 0) << output.text;
    return Json::parse(output.text, nullptr, false);
  }
  TestController controller_;
  std::string there_ = "--controller " + controller_.endpoint();
  TestNode prefill_{controller_.endpoint(), "prefill"}, decode_{controller_.endpoint(), "decode"};
};

TEST_F(Top, ShowsPoolsHitsAndTransfersOfBothSides) {
  hand_over(prefill_, decode_, "6f1a", 20);
  const Json told = nodes(" --sort hit");
  ASSERT_EQ(told.size(), 2u) << told.dump(2);
  EXPECT_EQ(told[0]["node"], "decode") << "it has the higher hit rate";
  EXPECT_NEAR(told[0]["hit_rate"].get<double>(), 20.0 / 21, 0.001);
  EXPECT_EQ(told[1]["hit_rate"], 0.0);
  EXPECT_GT(told[0]["in_gb_per_s"], 0.0);
  EXPECT_EQ(told[0]["out_gb_per_s"], 0.0);
  EXPECT_NEAR(told[1]["out_gb_per_s"].get<double>(), told[0]["in_gb_per_s"].get<double>(), 1e-12);
  for (const Json& node : told) {
    EXPECT_EQ(node["state"], "ok");
    EXPECT_EQ(node["role"], "both");
    EXPECT_NEAR(node["pool_fill"].get<double>(), 3.0 / 21, 0.001) << "three chunks of 3 KiB in 64 KiB";
    EXPECT_EQ(node["failure"], nullptr);
  }
  const std::string status = run_kvferry("status " + there_).text;
  EXPECT_THAT(status, ContainsRegex("POOL OF +USED +CAPACITY +FILL +PINNED +HIT RATE +FAILURES +LAST FAILURE"));
  EXPECT_THAT(status, ContainsRegex("\ndecode +9.00 KiB +63.0 KiB +14% +0 B +95% +0 +-\n"));
  EXPECT_THAT(status,
              ContainsRegex("\nprefill +decode +pull +[a-z]+ +0.00 +[0-9.]+ +[-0-9.]+ +7.88 KiB +0 +host slots\n"));
  EXPECT_THAT(status, ::testing::Not(HasSubstr("LOST NODE")));
}

TEST_F(Top, HasLinesOf80ColumnsWithoutEscapes) {
  hand_over(prefill_, decode_, "6f1a", 20);
  nodes();
  std::istringstream frame(run_kvferry("top --once " + there_).text);
  std::vector<std::string> lines;
  for (std::string line; std::getline(frame, line);) lines.push_back(line);
  ASSERT_EQ(lines.size(), 6u);
  for (const std::string& line : lines) {
    EXPECT_LE(line.size(), 80u) << line;
    EXPECT_TRUE(std::ranges::all_of(line, [](char c) { return c >= ' ' && c <= '~'; })) << line;
  }
  EXPECT_EQ(lines[1], "2 nodes, 0 lost; pools 18.0 KiB of 126 KiB; 0 transfers, 0 GB/s");
  EXPECT_THAT(lines[3], ContainsRegex("^NODE +STATE +ROLE +POOL +HIT +IN +OUT +XFER +REQ +FAILED$"));
  EXPECT_THAT(lines[4], ContainsRegex("^decode +ok +both +#\\.{7}  14%  95% +0 +0 +0 +0 +-$"));
}

TEST_F(Top, TellsWhyTheLastTransferFailed) {
  auto gone = std::make_unique<TestNode>(controller_.endpoint(), "gone");
  hand_over(*gone, decode_, "6f1a", 0, [&] { gone.reset(); });
  const Json told = nodes(" --sort failure");
  ASSERT_EQ(told.size(), 2u) << told.dump(2);
  EXPECT_EQ(told[0]["node"], "decode");
  EXPECT_THAT(told[0]["failure"]["what"].get<std::string>(), HasSubstr("the other node did not answer in time"));
  EXPECT_LT(told[0]["failure"]["ago_ms"], 60'000);
  EXPECT_THAT(run_kvferry("top --once " + there_).text,
              ContainsRegex("last failures\n +[0-9]+ s ago  decode: the other node did not answer in time"));
  EXPECT_THAT(run_kvferry("status " + there_).text, HasSubstr("s ago: the other node did not answer in time"));
}

}  // namespace
}  // namespace kvferry
