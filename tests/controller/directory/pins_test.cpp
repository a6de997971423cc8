// Tests the orders to pin chunks: which chunks, for how long, and how many.
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
  Pins pins;
  const ControllerPinId id = pins.add("ns", "ops", keys_of(0, 3), 0, 10'000).value();
  const auto orders = pins.orders_for("ns", kNode, keys_of(2, 7), 4 * kSecond);
  ASSERT_THAT(orders, SizeIs(1));
  EXPECT_EQ(orders[0].id, id);
  EXPECT_THAT(orders[0].keys, ElementsAre(key_of(2)));
  EXPECT_EQ(orders[0].ttl, 6 * kSecond);
  EXPECT_THAT(pins.orders_for("another", kNode, keys_of(2, 7), 0), IsEmpty());
  EXPECT_THAT(pins.orders_for("ns", kNode, keys_of(3, 8), 0), IsEmpty());
}

TEST(Pins, TwoPinsOfOneKeyAreTwoOrders) {
  Pins pins;
  const ControllerPinId a = pins.add("ns", "a", keys_of(0, 2), 0, 1000).value();
  const ControllerPinId b = pins.add("ns", "b", keys_of(1, 3), 0, 1000).value();
  EXPECT_THAT(pins.orders_for("ns", kNode, keys_of(1, 2), 0), SizeIs(2));
  EXPECT_THAT(pins.release(a).value(), UnorderedElementsAre(kNode));
  const auto orders = pins.orders_for("ns", kNode, keys_of(1, 2), 0);
  ASSERT_THAT(orders, SizeIs(1));
  EXPECT_EQ(orders[0].id, b);
}

TEST(Pins, AReleaseNamesThoseWhoWereAskedAndAreStillThere) {
  Pins pins;
  const ControllerPinId id = pins.add("ns", "ops", keys_of(0, 3), 0, 1000).value();
  pins.orders_for("ns", kNode, keys_of(0, 1), 0);
  pins.orders_for("ns", kOther, keys_of(1, 2), 0);
  pins.remove(kOther);
  EXPECT_THAT(pins.release(id).value(), UnorderedElementsAre(kNode));
  EXPECT_EQ(pins.release(id).error().code, ErrorCode::kNotFound);
  EXPECT_EQ(pins.num_keys(), 0u);
  EXPECT_THAT(pins.orders_for("ns", kNode, keys_of(0, 3), 0), IsEmpty());
}

TEST(Pins, AnOwnersHoldsEndTogether) {
  Pins pins;
  const ControllerPinId a = pins.add("ns", "reader", keys_of(0, 3), 0, 1000).value();
  const ControllerPinId b = pins.add("ns", "reader", keys_of(9, 12), 0, 1000).value();
  const ControllerPinId c = pins.add("ns", "ops", keys_of(0, 3), 0, 1000).value();
  pins.orders_for("ns", kNode, keys_of(9, 10), 0);
  const auto released = pins.release_owner("reader");
  EXPECT_THAT(released.at(a), IsEmpty());
  EXPECT_THAT(released.at(b), UnorderedElementsAre(kNode));
  EXPECT_EQ(pins.size(), 1u);
  EXPECT_NE(pins.find(c), nullptr);
}

TEST(Pins, EachHasADeadline) {
  Pins pins;
  pins.add("ns", "a", keys_of(0, 3), 0, 1000).value();
  pins.add("ns", "a", keys_of(0, 3), 0, 2000).value();
  pins.expire(kSecond - 1);
  EXPECT_EQ(pins.size(), 2u);
  // the first pin has expired, even if it is not removed yet
  EXPECT_THAT(pins.orders_for("ns", kNode, keys_of(0, 1), kSecond), SizeIs(1));
  pins.expire(kSecond);
  EXPECT_EQ(pins.size(), 1u);
  pins.expire(2 * kSecond);
  EXPECT_EQ(pins.size(), 0u);
}

TEST(Pins, BadRequestsAreRefusedWithASentence) {
  Pins pins({.ttl_max = 10 * kSecond, .keys_per_pin_max = 4, .keys_max = 10, .keys_per_owner_max = 6});
  const auto refusal = [&](const std::string& owner, std::vector<ChunkKey> keys, std::uint64_t ttl_ms) {
    return pins.add("ns", owner, std::move(keys), 0, ttl_ms).error().what;
  };
  EXPECT_THAT(refusal("", keys_of(0, 1), 1000), HasSubstr("needs an owner"));
  EXPECT_THAT(refusal("a", keys_of(0, 1), 0), HasSubstr("a pin can't last 0 ms; 1 to 10000 are allowed"));
  EXPECT_THAT(refusal("a", keys_of(0, 1), 11'000), HasSubstr("a pin can't last 11000 ms"));
  EXPECT_THAT(refusal("a", {}, 1000), HasSubstr("a pin can't have 0 keys; 1 to 4 are allowed"));
  EXPECT_THAT(refusal("a", keys_of(0, 5), 1000), HasSubstr("a pin can't have 5 keys"));
  ASSERT_TRUE(pins.add("ns", "a", keys_of(0, 4), 0, 1000));
  EXPECT_THAT(refusal("a", keys_of(0, 3), 1000),
              HasSubstr("owner 'a' has 4 pinned keys, and 3 more would exceed the limit of 6"));
  ASSERT_TRUE(pins.add("ns", "b", keys_of(0, 4), 0, 1000));
  EXPECT_THAT(refusal("c", keys_of(0, 3), 1000),
              HasSubstr("this controller has 8 pinned keys, and 3 more would exceed the limit of 10"));
}

TEST(Pins, AKeyNamedTwiceCountsOnce) {
  Pins pins;
  std::vector<ChunkKey> keys = keys_of(0, 2);
  keys.push_back(keys[0]);
  pins.add("ns", "a", keys, 0, 1000).value();
  EXPECT_EQ(pins.num_keys(), 2u);
}

}  // namespace
}  // namespace kvferry::controller
