#include "controller/index/hash_map64.h"

#include <gtest/gtest.h>

#include <random>
#include <unordered_map>

namespace kvferry::controller {
namespace {

TEST(HashMap64, DoesWhatAPlainMapDoes) {
  std::mt19937_64 random(3);
  HashMap64 map(random());
  std::unordered_map<std::uint64_t, std::uint64_t> model;
  for (int round = 0; round < 400'000; ++round) {
    const bool grows = round / 100'000 % 2 == 0;
    const std::uint64_t key = random() % 60'000;
    if (random() % 10 < (grows ? 8 : 2)) {
      if (model.emplace(key, round + 1).second) {
        ASSERT_EQ(map.find(key), nullptr);
        ASSERT_TRUE(map.insert(key, static_cast<std::uint64_t>(round) + 1));
      }
    } else {
      ASSERT_EQ(map.erase(key), model.erase(key) > 0);
    }
    if (round % 7 == 0) map.tidy(3, [](std::uint64_t) { return true; });
    if (round % 20'000 != 0) continue;
    ASSERT_EQ(map.size(), model.size());
    for (std::uint64_t any = 0; any < 60'000; ++any) {
      const auto it = model.find(any);
      const std::uint64_t* found = map.find(any);
      ASSERT_EQ(found != nullptr, it != model.end());
      if (found != nullptr) {
        ASSERT_EQ(*found, it->second);
      }
    }
  }
}

TEST(HashMap64, KeysThatAreInsertedWhileTheTableShrinksAreAllKept) {
  HashMap64 map(1);
  const auto keep = [](std::uint64_t) { return true; };
  constexpr std::uint64_t kMany = 400'000;
  for (std::uint64_t key = 0; key < kMany; ++key) ASSERT_TRUE(map.insert(key, key + 1));
  while (map.tidy(1024, keep)) {
  }
  const std::size_t bytes = map.num_bytes();
  for (std::uint64_t key = 0; key < kMany; ++key) ASSERT_TRUE(map.erase(key));
  ASSERT_TRUE(map.tidy(1, keep)) << "begins to shrink to the smallest table";
  for (std::uint64_t key = 0; key < 50'000; ++key) {
    ASSERT_TRUE(map.insert(kMany + key, key + 1)) << key;
    ASSERT_EQ(map.size(), key + 1);
  }
  for (std::uint64_t key = 0; key < 50'000; ++key) ASSERT_NE(map.find(kMany + key), nullptr) << key;
  EXPECT_LT(map.num_bytes(), bytes / 2);
}

TEST(HashMap64, ASweepErasesWhatIsNotWantedAndTheTableShrinks) {
  HashMap64 map(1);
  for (std::uint64_t key = 0; key < 100'000; ++key) map.insert(key, key + 1);
  const std::size_t bytes = map.num_bytes();
  while (map.tidy(1024, [](std::uint64_t) { return true; })) {
  }
  map.begin_sweep();
  while (map.tidy(1024, [](std::uint64_t value) { return value % 100 == 1; })) {
  }
  EXPECT_EQ(map.size(), 1000U);
  for (std::uint64_t key = 0; key < 100'000; ++key) ASSERT_EQ(map.find(key) != nullptr, key % 100 == 0);
  EXPECT_LT(map.num_bytes(), bytes / 10);
}

}  // namespace
}  // namespace kvferry::controller
