#include "transport/base/versions.h"

#include <gmock/gmock.h>

namespace kvferry {
namespace {

using ::testing::HasSubstr;

std::uint32_t agreed(VersionRange ours, VersionRange theirs) {
  const auto common = common_version("protocol", {"this side", "2.0", ours}, {"the node 'a'", "1.0", theirs});
  return common ? *common : 0;
}

TEST(Versions, TheNewestThatBothSpeakIsUsed) {
  EXPECT_EQ(agreed({1, 1}, {1, 1}), 1u);
  EXPECT_EQ(agreed({1, 3}, {1, 1}), 1u);
  EXPECT_EQ(agreed({1, 3}, {2, 5}), 3u);
  EXPECT_EQ(agreed({2, 5}, {1, 3}), 3u);
  EXPECT_EQ(agreed({2, 2}, {1, 3}), 2u);
}

TEST(Versions, AllSmallRangesAgreeOnTheSameFromBothSides) {
  for (std::uint32_t a = 1; a < 6; ++a)
    for (std::uint32_t b = a; b < 6; ++b)
      for (std::uint32_t c = 1; c < 6; ++c)
        for (std::uint32_t d = c; d < 6; ++d) {
          std::uint32_t expected = 0;
          for (std::uint32_t version = 1; version < 6; ++version)
            if (a <= version && version <= b && c <= version && version <= d) expected = version;
          EXPECT_EQ(agreed({a, b}, {c, d}), expected);
          EXPECT_EQ(agreed({c, d}, {a, b}), expected);
        }
}

TEST(Versions, ARefusalNamesBothSides) {
  const auto common =
      common_version("controller protocol", {"this controller", "2.0.0", {3, 4}}, {"node 'a'", "", {1, 1}});
  ASSERT_FALSE(common);
  EXPECT_EQ(common.error().code, ErrorCode::kRefused);
  EXPECT_EQ(common.error().what,
            "no version of the controller protocol in common: this controller (kvferry 2.0.0) speaks versions 3 to 4, "
            "node 'a' (of an older kvferry) speaks version 1; run kvferry releases that share one");
}

}  // namespace
}  // namespace kvferry
