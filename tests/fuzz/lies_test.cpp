#include "tests/fuzz/lies.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "tests/fuzz/examples.h"

namespace kvferry::fuzz {
namespace {

using ::testing::Contains;
using ::testing::Each;
using ::testing::Not;

template <class Message>
std::set<std::size_t> kinds_of(const std::vector<Message>& examples) {
  std::set<std::size_t> kinds;
  for (const Message& message : examples) kinds.insert(message.index());
  return kinds;
}

TEST(Examples, HaveEveryMessage) {
  EXPECT_EQ(kinds_of(examples_between_nodes()).size(), std::variant_size_v<AnyMessage>);
}

TEST(Lies, AreAboutEveryFieldAndDiffer) {
  const std::string truth = encode(ShardRun{1, 2, 3, 4});
  const std::vector<std::string> lies = lies_about(truth);
  EXPECT_THAT(lies, Each(Not(truth)));
  EXPECT_EQ(std::set(lies.begin(), lies.end()).size(), lies.size());
  EXPECT_THAT(lies, Contains(encode(ShardRun{0xffffffff, 2, 3, 4})));
  EXPECT_THAT(lies, Contains(encode(ShardRun{1, 2, 3, ~std::uint64_t{0}})));
  const std::string nested = encode(std::vector{ShardRun{1, 2, 3, 4}});
  EXPECT_THAT(lies_about(nested), Contains(encode(std::vector{ShardRun{1, 2, 3, 0}})));
  EXPECT_THAT(lies_about(nested), Contains(encode(std::vector{ShardRun{1, 2, 3, 4}, ShardRun{1, 2, 3, 4}})));
}

}  // namespace
}  // namespace kvferry::fuzz
