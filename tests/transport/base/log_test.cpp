#include "transport/base/log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

namespace kvferry {
namespace {

using testing::EndsWith;
using testing::HasSubstr;

std::string logged(const std::string& message) {
  testing::internal::CaptureStderr();
  log().error("{}", message);
  return testing::internal::GetCapturedStderr();
}

TEST(Log, AMessageIsOneLineWithoutControlCharacters) {
  const std::string line = logged("node \x1b[2J\r\n2026-11-24 kvferry[1] info forged \x7f Zürich");
  EXPECT_THAT(line, EndsWith(" error node \\x1b[2J\\x0d\\x0a2026-11-24 kvferry[1] info forged \\x7f Zürich\n"));
}

TEST(Log, ALongMessageIsCut) {
  const std::string line = logged(std::string(9000, 'a'));
  EXPECT_THAT(line, EndsWith(std::string(100, 'a') + "... (808 more bytes)\n"));
  EXPECT_LT(line.size(), 8400U);
}

TEST(LogDeathTest, AnUnknownLevelIsNamedAndInfoIsUsed) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // the level is read once for each process
  const auto say = [](const char* level) {
    ::setenv("KVFERRY_LOG", level, 1);
    log().info("said at info");
    std::exit(3);
  };
  EXPECT_EXIT(say("loud"), testing::ExitedWithCode(3),
              "KVFERRY_LOG is 'loud', which is no level; allowed: trace(.|\n)*said at info");
  EXPECT_EXIT(say("off"), testing::ExitedWithCode(3), "^$");
}

}  // namespace
}  // namespace kvferry
