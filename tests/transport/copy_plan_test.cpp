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

/// Returns the joined ranges. Regions have 2000 bytes.
std::vector<CopyRange> plan(std::vector<CopyRange> ranges) {
  const std::vector<CopyRange> given = ranges;
  const bool can_join = check_ranges(ranges, 2000, 2000).value();
  join_ranges(ranges);
  EXPECT_EQ(can_join, ranges != given);
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

TEST(CopyPlan, JoinsNothingInOneRange) { EXPECT_THAT(plan({{0, 0, 2000}}), ElementsAre(CopyRange{0, 0, 2000})); }

TEST(CopyPlan, NamesTheRangeThatLeavesItsRegion) {
  const auto refused = check_ranges(std::vector<CopyRange>{{0, 0, 10}, {995, 0, 6}}, 1000, 1000);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kInvalidArgument);
  EXPECT_THAT(refused.error().what, HasSubstr("range 1"));
  EXPECT_THAT(refused.error().what, HasSubstr("local"));
}

TEST(CopyPlan, RefusesRangesWhoseEndsOverflow) {
  constexpr std::uint64_t kHuge = std::numeric_limits<std::uint64_t>::max();
  for (const CopyRange& range : {CopyRange{0, 0, kHuge}, CopyRange{kHuge, 0, 1}, CopyRange{0, kHuge, 1},
                                 CopyRange{kHuge, kHuge, kHuge}, CopyRange{0, 1000, 1}, CopyRange{1001, 0, 0}})
    EXPECT_FALSE(check_ranges(std::vector<CopyRange>{{0, 0, 10}, range, {20, 20, 10}}, 1000, 1000));
}

}  // namespace
}  // namespace kvferry
