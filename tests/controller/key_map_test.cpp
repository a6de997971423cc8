// The key map against std::map, with resizing and cleaning passes under way all the time.
#include "controller/key_map.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>

#include "tests/controller/fixtures.h"

namespace kvferry::controller {
namespace {

template <class Key>
Key make_key(std::uint64_t number);
template <>
ShortKey make_key<ShortKey>(std::uint64_t number) {
  return number;  // zero too, and in order: engines' hashes need not be good ones
}
template <>
ChunkKey make_key<ChunkKey>(std::uint64_t number) {
  ChunkKey key{};
  std::memcpy(key.bytes.data() + (number % 2 == 0 ? 0 : 8), &number, sizeof number);  // either half may be all zeros
  return key;
}

template <class Key>
class KeyMapTest : public ::testing::Test {
 protected:
  void expect_equal(const KeyMap<Key>& map, const std::map<Key, std::uint32_t>& model) {
    ASSERT_EQ(map.size(), model.size());
    for (const auto& [key, value] : model) ASSERT_EQ(map.find(key), value);
  }
};
using Keys = ::testing::Types<ShortKey, ChunkKey>;
TYPED_TEST_SUITE(KeyMapTest, Keys);

TYPED_TEST(KeyMapTest, AnswersAsAMapDoesWhilePassesGoOn) {
  using Map = KeyMap<TypeParam>;
  std::size_t num_resizes = 0;
  std::size_t num_cleaned = 0;
  for (unsigned seed = 1; seed <= 12; ++seed) {
    std::mt19937_64 random(seed);
    Map map(random());
    std::map<TypeParam, std::uint32_t> model;
    const std::uint64_t num_numbers = std::uint64_t{1} << (4 + random() % 11);
    std::uint32_t doomed = 0;  // passes drop keys with this value
    const auto clean = [&](std::uint32_t value) { return value == doomed ? 0 : value; };
    std::set<TypeParam> behind;  // may keep a doomed value: put in while the pass went on
    for (int step = 0; step < 40'000; ++step) {
      // Phases of growth and of decline, so that tables move both ways.
      const bool growing = step / 8'000 % 2 == 0;
      const TypeParam key = make_key<TypeParam>(random() % num_numbers);
      const auto known = model.find(key);
      ASSERT_EQ(map.find(key), known == model.end() ? 0 : known->second) << "seed " << seed << " step " << step;
      const std::uint64_t dice = random() % 10;
      if (known == model.end()) {
        if (growing || dice < 2) {
          const auto value = static_cast<std::uint32_t>(1 + random() % 50);
          map.insert(key, value);
          model[key] = value;
          if (map.in_pass()) behind.insert(key);
        }
      } else if (dice < (growing ? 2 : 8)) {
        map.erase(key);
        model.erase(known);
      } else if (dice == 9) {
        *map.find_place(key) = known->second = static_cast<std::uint32_t>(1 + random() % 50);
        if (map.in_pass()) behind.insert(key);
      }
      if (!map.in_pass() ? map.wants_resize() || random() % 2'000 == 0 : !map.is_resizing() && map.wants_resize()) {
        doomed = static_cast<std::uint32_t>(random() % 50);
        behind.clear();
        map.begin_pass();
        num_resizes += map.is_resizing();
      }
      if (map.in_pass() && map.advance(1 + random() % 3, clean)) {
        for (auto it = model.begin(); it != model.end();) {
          const std::uint32_t now = map.find(it->first);
          if (it->second == doomed && now == 0) {
            it = model.erase(it);
            ++num_cleaned;
            continue;
          }
          ASSERT_EQ(now, it->second);
          ASSERT_TRUE(it->second != doomed || behind.contains(it->first)) << "the pass left a key out";
          ++it;
        }
        this->expect_equal(map, model);
      }
      // What a pass has erased is gone at once: the model learns it when it next asks.
      if (map.in_pass() && doomed != 0) {
        for (auto it = model.begin(); it != model.end();)
          it = it->second == doomed && map.find(it->first) == 0 ? (++num_cleaned, model.erase(it)) : std::next(it);
      }
    }
  }
  EXPECT_GT(num_resizes, 80U);
  EXPECT_GT(num_cleaned, 500U);
}

TYPED_TEST(KeyMapTest, KeysThatAllFallOnOnePlaceAreKeptAside) {
  constexpr std::uint64_t kSeed = 42;
  KeyMap<TypeParam> map(kSeed);
  std::map<TypeParam, std::uint32_t> model;
  for (std::uint64_t number = 1; model.size() < 600; ++number) {
    const TypeParam key = make_key<TypeParam>(number);
    if (map.hash(key) >> 52 != 0) continue;  // the first of 4096 parts
    const auto value = static_cast<std::uint32_t>(number);
    map.insert(key, value);
    model[key] = value;
    if (map.wants_resize() && !map.in_pass()) map.begin_pass();
    if (map.in_pass()) map.advance(1, {});
  }
  while (map.in_pass() && !map.advance(100, {})) {
  }
  this->expect_equal(map, model);
  ASSERT_FALSE(map.in_pass());
  map.begin_pass();  // cleaning reaches what lies aside
  while (!map.advance(100, [](std::uint32_t value) { return value % 2 == 0 ? 0 : value; })) {
  }
  std::erase_if(model, [](const auto& entry) { return entry.second % 2 == 0; });
  this->expect_equal(map, model);
  for (const auto& [key, value] : model) map.erase(key);
  EXPECT_EQ(map.size(), 0U);
}

TYPED_TEST(KeyMapTest, GrowsAndShrinksInSmallSteps) {
  KeyMap<TypeParam> map(7);
  const auto tend = [&] {
    if (map.wants_resize() && !map.in_pass()) map.begin_pass();
    if (map.in_pass()) map.advance(4, {});
  };
  for (std::uint64_t number = 0; number < 100'000; ++number) {
    map.insert(make_key<TypeParam>(number), 1);
    tend();
  }
  EXPECT_LT(map.num_buckets() * KeyBucket<TypeParam>::kSlots, 100'000U * 11 / 5);
  EXPECT_FALSE(map.wants_resize()) << "four buckets a key do not keep up";
  for (std::uint64_t number = 0; number < 99'990; ++number) {
    map.erase(make_key<TypeParam>(number));
    tend();
  }
  EXPECT_LT(map.num_buckets(), 200U);
  for (std::uint64_t number = 99'990; number < 100'000; ++number) EXPECT_EQ(map.find(make_key<TypeParam>(number)), 1U);
}

}  // namespace
}  // namespace kvferry::controller
