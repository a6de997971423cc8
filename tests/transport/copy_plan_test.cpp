#include "transport/copy_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace kvferry {

bool operator==(const CopyRange& a, const CopyRange& b) {
  return a.local_offset == b.local_offset && a.remote_offset == b.remote_offset && a.bytes == b.bytes;
}

namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<CopyRange> plan(std::vector<CopyRange> ranges) {
  join_ranges(ranges);
  return ranges;
}

TEST(CopyPlan, JoinsNeighboursThatTouchOnBothSides) {
  EXPECT_THAT(plan({{0, 100, 10}, {10, 110, 5}, {15, 115, 1}}), ElementsAre(CopyRange{0, 100, 16}));
}

TEST(CopyPlan, KeepsNeighboursApartThatTouchOnOneSideOnly) {
  EXPECT_THAT(plan({{0, 100, 10}, {10, 111, 5}, {16, 116, 1}}),
              ElementsAre(CopyRange{0, 100, 10}, CopyRange{10, 111, 5}, CopyRange{16, 116, 1}));
}

TEST(CopyPlan, DropsEmptyRangesAndJoinsAcrossThem) {
  EXPECT_THAT(plan({{5, 5, 0}, {0, 100, 10}, {1000, 1000, 0}, {10, 110, 5}}), ElementsAre(CopyRange{0, 100, 15}));
}

TEST(CopyPlan, NamesTheRangeThatLeavesItsRegion) {
  const auto refused = check_ranges(std::vector<CopyRange>{{0, 0, 10}, {995, 0, 6}}, 1000, 1000);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kInvalidArgument);
  EXPECT_THAT(refused.error().what, HasSubstr("range 1"));
  EXPECT_THAT(refused.error().what, HasSubstr("local"));
}

}  // namespace
}  // namespace kvferry
