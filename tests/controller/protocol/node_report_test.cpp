// Tests which reports of nodes a controller accepts. A report is input of another host.
#include "controller/api/node_report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <limits>

namespace kvferry::controller {
namespace {

using ::testing::HasSubstr;

NodeReport good_report() {
  NodeReport report{.num_slots = 10, .num_chunks = 4};
  report.paths.assign(kReportPathsMax, {"tcp://10.0.0.1:1", "shm", true, 1000, 1, 0.5, 2, 4, 3});
  report.failures.assign(kReportFailuresMax, {std::string(kReportTextMax, 'x'), "tcp://10.0.0.1:1", 1500});
  report.prefixes.assign(kReportPrefixesMax, {"0123abcd", 12.5});
  return report;
}

TEST(NodeReports, OfTheLargestSizeAreRead) {
  const Result<NodeReport> read = parse_report(encode(good_report()));
  ASSERT_TRUE(read) << read.error().what;
  EXPECT_EQ(read->num_slots, 10U);
  EXPECT_EQ(read->paths.size(), kReportPathsMax);
  EXPECT_TRUE(read->paths[15].is_push);
  EXPECT_EQ(read->failures[3].ago_ms, 1500U);
  EXPECT_EQ(read->prefixes[7].per_minute, 12.5);
}

TEST(NodeReports, ThatAreWrongInOnePlaceAreRefusedWithAReason) {
  constexpr double kInfinite = std::numeric_limits<double>::infinity(), kNan = std::numeric_limits<double>::quiet_NaN();
  const struct {
    std::function<void(NodeReport&)> change;
    const char* why;
  } cases[] = {
      {[](NodeReport& report) { report.paths.emplace_back(); },
       "it lists 17 paths, 4 failures and 8 prefixes; at most 16, 4 and 8"},
      {[](NodeReport& report) { report.failures.emplace_back(); }, "it lists 16 paths, 5 failures and 8 prefixes"},
      {[](NodeReport& report) { report.prefixes.emplace_back(); }, "it lists 16 paths, 4 failures and 9 prefixes"},
      {[](NodeReport& report) { report.tokens = -1; }, "is not between 0 and 1e+15"},
      {[](NodeReport& report) { report.loaded_tokens = kNan; }, "is not between 0 and 1e+15"},
      {[](NodeReport& report) { report.local_tokens = 1e300; }, "is not between 0 and 1e+15"},
      {[](NodeReport& report) { report.paths[3].gb_per_s = kInfinite; }, "is not between 0 and 1e+15"},
      {[](NodeReport& report) { report.paths[3].last_gb_per_s = -0.5; }, "is not between 0 and 1e+15"},
      {[](NodeReport& report) { report.paths[3].limit_gb_per_s = -1; }, "is not between 0 and 1e+15"},
      {[](NodeReport& report) { report.paths[3].best_gb_per_s = kNan; }, "is not between 0 and 1e+15"},
      {[](NodeReport& report) { report.prefixes[1].per_minute = kNan; }, "is not between 0 and 1e+15"},
      {[](NodeReport& report) { report.paths[0].peer = "tcp://\x1b[2J"; }, "not printable"},
      {[](NodeReport& report) { report.paths[0].path = "\xff"; }, "not printable"},
      {[](NodeReport& report) { report.weights_epoch = "1\n"; }, "not printable"},
      {[](NodeReport& report) { report.failures[0].what += "x"; }, "too long"},
      {[](NodeReport& report) { report.failures[0].peer = "two\nlines"; }, "not printable"},
      {[](NodeReport& report) { report.prefixes[0].chunk = std::string(1, '\0'); }, "not printable"},
  };
  for (const auto& [change, why] : cases) {
    NodeReport report = good_report();
    change(report);
    const Result<NodeReport> read = parse_report(encode(report));
    ASSERT_FALSE(read) << why;
    EXPECT_THAT(read.error().what, HasSubstr(why));
  }
  EXPECT_THAT(parse_report(std::string(kReportBytesMax + 1, ' ')).error().what, HasSubstr("at most 8192"));
  EXPECT_THAT(parse_report("garbage").error().what, HasSubstr("malformed report of a node"));
}

TEST(NodeReports, HaveTextsThatAreMadePrintable) {
  EXPECT_EQ(report_text("a\tb\xc3\xa9"), "a?b??");
  EXPECT_EQ(report_text(std::string(300, 'x')).size(), kReportTextMax);
}

}  // namespace
}  // namespace kvferry::controller
