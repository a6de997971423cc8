// What nodes are asked to keep: whose, how long, how much.
#include "controller/directory/pins.h"

#include <gmock/gmock.h>

#include "tests/controller/fixtures.h"

namespace kvferry::controller {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using ::testing::UnorderedElementsAre;

constexpr NodeId kNode{1}, kOther{2};

TEST(Pins, WhoeverHasAHeldKeyIsAskedToKeepItForTheTimeThatIsLeft) {
  Pins holds;
  const ControllerPinId hold = holds.add("ns", "ops", keys_of(0, 3), 0, 10 * kSecond).value();
  const auto wishes = holds.wishes("ns", kNode, keys_of(2, 7), 4 * kSecond);
  ASSERT_THAT(wishes, SizeIs(1));
  EXPECT_EQ(wishes[0].hold, hold);
  EXPECT_THAT(wishes[0].keys, ElementsAre(key_of(2)));
  EXPECT_EQ(wishes[0].ttl, 6 * kSecond);
  EXPECT_THAT(holds.wishes("another", kNode, keys_of(2, 7), 0), IsEmpty());
  EXPECT_THAT(holds.wishes("ns", kNode, keys_of(3, 8), 0), IsEmpty());
}

TEST(Pins, TwoHoldsOfOneKeyAreTwoWishes) {
  Pins holds;
  const ControllerPinId a = holds.add("ns", "a", keys_of(0, 2), 0, kSecond).value();
  const ControllerPinId b = holds.add("ns", "b", keys_of(1, 3), 0, kSecond).value();
  EXPECT_THAT(holds.wishes("ns", kNode, keys_of(1, 2), 0), SizeIs(2));
  EXPECT_THAT(holds.release(a).value(), UnorderedElementsAre(kNode));
  const auto wishes = holds.wishes("ns", kNode, keys_of(1, 2), 0);
  ASSERT_THAT(wishes, SizeIs(1));
  EXPECT_EQ(wishes[0].hold, b);
}

TEST(Pins, AReleaseNamesThoseWhoWereAskedAndAreStillThere) {
  Pins holds;
  const ControllerPinId hold = holds.add("ns", "ops", keys_of(0, 3), 0, kSecond).value();
  holds.wishes("ns", kNode, keys_of(0, 1), 0);
  holds.wishes("ns", kOther, keys_of(1, 2), 0);
  holds.forget(kOther);
  EXPECT_THAT(holds.release(hold).value(), UnorderedElementsAre(kNode));
  EXPECT_EQ(holds.release(hold).error().code, ErrorCode::kNotFound);
  EXPECT_EQ(holds.num_keys(), 0u);
  EXPECT_THAT(holds.wishes("ns", kNode, keys_of(0, 3), 0), IsEmpty());
}

TEST(Pins, AnOwnersHoldsEndTogether) {
  Pins holds;
  const ControllerPinId a = holds.add("ns", "reader", keys_of(0, 3), 0, kSecond).value();
  const ControllerPinId b = holds.add("ns", "reader", keys_of(9, 12), 0, kSecond).value();
  const ControllerPinId c = holds.add("ns", "ops", keys_of(0, 3), 0, kSecond).value();
  holds.wishes("ns", kNode, keys_of(9, 10), 0);
  const auto released = holds.release_owner("reader");
  EXPECT_THAT(released.at(a), IsEmpty());
  EXPECT_THAT(released.at(b), UnorderedElementsAre(kNode));
  EXPECT_EQ(holds.size(), 1u);
  EXPECT_NE(holds.find(c), nullptr);
}

TEST(Pins, EachHasADeadline) {
  Pins holds;
  holds.add("ns", "a", keys_of(0, 3), 0, kSecond).value();
  holds.add("ns", "a", keys_of(0, 3), 0, 2 * kSecond).value();
  EXPECT_EQ(holds.expire(kSecond - 1), 0u);
  EXPECT_THAT(holds.wishes("ns", kNode, keys_of(0, 1), kSecond), SizeIs(1));  // the first is over, if not yet away
  EXPECT_EQ(holds.expire(kSecond), 1u);
  EXPECT_EQ(holds.expire(2 * kSecond), 1u);
  EXPECT_EQ(holds.size(), 0u);
}

TEST(Pins, BadWishesAreRefusedWithASentence) {
  Pins holds({.ttl_max = 10 * kSecond, .keys_per_hold_max = 4, .keys_max = 10, .keys_per_owner_max = 6});
  const auto refusal = [&](const std::string& owner, std::vector<ChunkKey> keys, TimeNs ttl) {
    return holds.add("ns", owner, std::move(keys), 0, ttl).error().what;
  };
  EXPECT_THAT(refusal("", keys_of(0, 1), kSecond), HasSubstr("needs an owner"));
  EXPECT_THAT(refusal("a", keys_of(0, 1), 0), HasSubstr("a hold of 0 ms; 1 to 10000 are allowed"));
  EXPECT_THAT(refusal("a", keys_of(0, 1), 11 * kSecond), HasSubstr("a hold of 11000 ms"));
  EXPECT_THAT(refusal("a", {}, kSecond), HasSubstr("a hold of 0 keys; 1 to 4 are allowed"));
  EXPECT_THAT(refusal("a", keys_of(0, 5), kSecond), HasSubstr("a hold of 5 keys"));
  ASSERT_TRUE(holds.add("ns", "a", keys_of(0, 4), 0, kSecond));
  EXPECT_THAT(refusal("a", keys_of(0, 3), kSecond), HasSubstr("'a' holds 4 of the 6 keys that are allowed"));
  ASSERT_TRUE(holds.add("ns", "b", keys_of(0, 4), 0, kSecond));
  EXPECT_THAT(refusal("c", keys_of(0, 3), kSecond), HasSubstr("all owners together hold 8 of the 10 keys"));
}

TEST(Pins, AKeyNamedTwiceCountsOnce) {
  Pins holds;
  std::vector<ChunkKey> keys = keys_of(0, 2);
  keys.push_back(keys[0]);
  holds.add("ns", "a", keys, 0, kSecond).value();
  EXPECT_EQ(holds.num_keys(), 2u);
}

}  // namespace
}  // namespace kvferry::controller
