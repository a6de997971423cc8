// Compares the key map with std::map, while resizes and sweeps are in progress all the time.
#include "controller/index/key_map.h"

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
  return number;  // includes zero; the numbers are in order, because the hashes of engines need not be random
}
template <>
ChunkKey make_key<ChunkKey>(std::uint64_t number) {
  ChunkKey key{};
  // either half of the key may be all zeros
  std::memcpy(key.bytes.data() + (number % 2 == 0 ? 0 : 8), &number, sizeof number);
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

template <class Key>
void erase(KeyMap<Key>& map, const Key& key) {
  typename KeyMap<Key>::Cursor cursor;
  ASSERT_NE(map.find(key, cursor), 0U);
  map.erase(cursor);
  ASSERT_EQ(map.find(key), 0U);
  map.finish_erasing();
}

TYPED_TEST(KeyMapTest, AnswersAsAMapDoesWhileItIsTidied) {
  using Map = KeyMap<TypeParam>;
  std::size_t num_sizes = 0;
  std::size_t num_cleaned = 0;
  for (unsigned seed = 1; seed <= 12; ++seed) {
    std::mt19937_64 random(seed);
    Map map(random());
    std::map<TypeParam, std::uint32_t> model;
    const std::uint64_t num_numbers = std::uint64_t{1} << (4 + random() % 11);
    std::uint32_t doomed = 0;  // sweeps erase the keys with this value
    std::set<TypeParam> late;  // these keys were changed during the sweep, so they may still have a doomed value
    const auto clean = [&](std::uint32_t value) { return value == doomed ? 0 : value; };
    for (int step = 0; step < 40'000; ++step) {
      // Phases in which the table grows, and phases in which it shrinks.
      const bool growing = step / 8'000 % 2 == 0;
      const std::uint64_t number = random() % num_numbers;
      const TypeParam key = make_key<TypeParam>(number);
      typename Map::Cursor run;
      for (std::uint64_t next = number; next < number + 4; ++next) {
        const auto known = model.find(make_key<TypeParam>(next));
        ASSERT_EQ(map.find(make_key<TypeParam>(next), run), known == model.end() ? 0 : known->second)
            << "seed " << seed << " step " << step;
      }
      const auto known = model.find(key);
      const std::uint64_t dice = random() % 10;
      if (known == model.end()) {
        if (growing || dice < 2) {
          const auto value = static_cast<std::uint32_t>(1 + random() % 50);
          map.insert(key, value);
          model[key] = value;
          if (map.in_sweep()) late.insert(key);
        }
      } else if (dice < (growing ? 2 : 8)) {
        erase(map, key);
        model.erase(known);
      } else if (dice == 9) {
        typename Map::Cursor cursor;
        *map.find_place(key, cursor) = known->second = static_cast<std::uint32_t>(1 + random() % 50);
        if (map.in_sweep()) late.insert(key);
      }
      if (!map.in_sweep() && random() % 2'000 == 0) {
        doomed = static_cast<std::uint32_t>(random() % 50);
        late.clear();
        map.begin_sweep();
      }
      const bool was_in_sweep = map.in_sweep();
      const std::size_t num_buckets = map.num_buckets();
      if (random() % 4 != 0) map.tidy(1 + random() % 3, clean);
      num_sizes += map.num_buckets() != num_buckets;
      if (!was_in_sweep) continue;
      // The keys that a sweep has erased are erased from the model at once.
      for (auto it = model.begin(); it != model.end();)
        it = it->second == doomed && map.find(it->first) == 0 ? (++num_cleaned, model.erase(it)) : std::next(it);
      if (map.in_sweep()) continue;
      this->expect_equal(map, model);
      for (const auto& [left, value] : model)
        ASSERT_TRUE(value != doomed || late.contains(left)) << "the sweep left a key out";
    }
  }
  EXPECT_GT(num_sizes, 40U);
  EXPECT_GT(num_cleaned, 500U);
}

TYPED_TEST(KeyMapTest, KeysThatAllFallOnOnePlaceAreKeptAside) {
  constexpr std::uint64_t kSeed = 42;
  KeyMap<TypeParam> map(kSeed);
  std::map<TypeParam, std::uint32_t> model;
  for (std::uint64_t number = 1; model.size() < 1'500; ++number) {
    const TypeParam key = make_key<TypeParam>(number);
    if (map.hash(key) >> 54 != 0) continue;  // only keys in the first of 1024 parts
    const auto value = static_cast<std::uint32_t>(number);
    map.insert(key, value);
    model[key] = value;
    map.tidy(1, {});
  }
  while (map.tidy(100, {})) {
  }
  this->expect_equal(map, model);
  map.begin_sweep();  // a sweep must also reach the keys that are stored aside
  while (map.tidy(100, [](std::uint32_t value) { return value % 2 == 0 ? 0 : value; })) {
  }
  std::erase_if(model, [](const auto& entry) { return entry.second % 2 == 0; });
  this->expect_equal(map, model);
  for (const auto& [key, value] : model) erase(map, key);
  EXPECT_EQ(map.size(), 0U);
}

TYPED_TEST(KeyMapTest, GrowsAndShrinksInSmallSteps) {
  KeyMap<TypeParam> map(7);
  for (std::uint64_t number = 0; number < 100'000; ++number) {
    map.insert(make_key<TypeParam>(number), 1);
    map.tidy(4, {});
  }
  EXPECT_LT(map.num_buckets() * 10, 100'000U * 2);
  EXPECT_GT(map.num_buckets() * 9, 100'000U) << "four lines a key do not keep up";
  for (std::uint64_t number = 0; number < 99'990; ++number) {
    erase(map, make_key<TypeParam>(number));
    map.tidy(4, {});
  }
  EXPECT_LT(map.num_buckets(), 200U);
  for (std::uint64_t number = 99'990; number < 100'000; ++number) EXPECT_EQ(map.find(make_key<TypeParam>(number)), 1U);
}

TYPED_TEST(KeyMapTest, MovesEntriesTogetherWhereTheLogGrowsThinAndSweepsMissNoneOfThem) {
  constexpr std::uint64_t kNumKept = 300'000;
  KeyMap<TypeParam> map(7);
  std::mt19937_64 random(1);
  std::vector<std::uint64_t> held;  // includes the numbers that sweeps have erased
  std::uint64_t last = 0;
  std::uint64_t doomed = 16;        // a sweep erases the numbers that have this remainder ...
  std::uint64_t last_at_begin = 0;  // ... and are at most this, or some of the later ones
  const auto clean = [&](std::uint32_t value) { return value % 16 == doomed ? 0 : value; };
  const auto insert = [&] {
    ++last;
    map.insert(make_key<TypeParam>(last), static_cast<std::uint32_t>(last));
    held.push_back(last);
  };
  while (last < kNumKept) {
    insert();
    map.tidy(4, {});
  }
  std::size_t num_used_max = 0;
  std::size_t num_sweeps = 0;
  for (std::uint64_t i = 0; i < 4 * kNumKept; ++i) {
    std::uint64_t& victim = held[random() % held.size()];
    if (map.find(make_key<TypeParam>(victim)) != 0) erase(map, make_key<TypeParam>(victim));
    victim = held.back();
    held.pop_back();
    insert();
    if (!map.in_sweep() && i % 150'000 == 0) {
      doomed = random() % 16;
      last_at_begin = last;
      map.begin_sweep();
    }
    const bool was_in_sweep = map.in_sweep();
    map.tidy(4, clean);
    num_used_max = std::max(num_used_max, map.log().num_used());
    if (!was_in_sweep || map.in_sweep()) continue;
    ++num_sweeps;
    std::size_t num_left = 0;
    for (const std::uint64_t number : held) {
      const std::uint32_t value = map.find(make_key<TypeParam>(number));
      num_left += value != 0;
      ASSERT_TRUE(value == 0 || value == number);
      ASSERT_FALSE(value != 0 && number % 16 == doomed && number <= last_at_begin) << "the sweep left a key out";
    }
    ASSERT_EQ(map.size(), num_left);
    ASSERT_GT(num_left, held.size() / 2) << "a sweep took too much";
  }
  EXPECT_GE(num_sweeps, 7U);
  EXPECT_LT(num_used_max, kNumKept * 2) << "segments stay open: four lines a change do not keep up";
  for (const std::uint64_t number : held) {
    if (map.find(make_key<TypeParam>(number)) != 0) erase(map, make_key<TypeParam>(number));
  }
  EXPECT_EQ(map.size(), 0U);
}

}  // namespace
}  // namespace kvferry::controller
