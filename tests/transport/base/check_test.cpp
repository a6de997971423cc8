#include "transport/base/check.h"

#include <gtest/gtest.h>

namespace kvferry {
namespace {

TEST(CheckDeathTest, AFailedCheckAsksForAReportAndEndsWithItsReason) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // starts the program anew instead of forking a process with threads
  const int least = 2, value = 1;
  EXPECT_DEATH(KVFERRY_CHECK(value >= least, "the value is {}; at least {} is needed", value, least),
               "internal error of kvferry.*Please report it(.|\n)*"
               "kvferry: failed check: the value is 1; at least 2 is needed \\(value >= least\\) \\[.*check_test.cpp:");
}

}  // namespace
}  // namespace kvferry
