#include "transport/base/wire.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace kvferry {
namespace {

struct Old {
  int a = 0;
  KVFERRY_FIELDS(a);
};
struct New {
  int a = 0;
  std::vector<ChunkKey> keys;
  KVFERRY_FIELDS(a, keys);
};

TEST(Wire, RoundTripsKeysAsBinary) {
  const New sent{7, {root_key("m", ""), root_key("n", "")}};
  const Result<New> got = decode<New>(encode(sent), "test message");
  ASSERT_TRUE(got) << got.error().str();
  EXPECT_EQ(got->a, 7);
  EXPECT_EQ(got->keys, sent.keys);
}

TEST(Wire, AFieldOfAnotherTypeIsToldInWords) {
  const Result<Old> got = decode<Old>(encode(std::vector<std::string>{"text"}), "test message");
  ASSERT_FALSE(got);
  EXPECT_EQ(got.error().what, "malformed test message (6 bytes): a field is missing or has another type");
}

TEST(Wire, AnOldReaderIgnoresWhatANewWriterAdded) {
  const Result<Old> got = decode<Old>(encode(New{7, {}}), "test message");
  ASSERT_TRUE(got);
  EXPECT_EQ(got->a, 7);
}

TEST(Wire, ANewReaderKeepsDefaultsForWhatAnOldWriterLacks) {
  const Result<New> got = decode<New>(encode(Old{7}), "test message");
  ASSERT_TRUE(got);
  EXPECT_TRUE(got->keys.empty());
}

TEST(Wire, GarbageIsAnErrorThatNamesTheMessage) {
  for (const std::string& bytes :
       {std::string("\xc1"), std::string(), std::string("\x92\x01"), std::string("\xdd\xff\xff\xff\xff", 5),
        std::string("\xa3"
                    "abc")}) {
    const Result<New> got = decode<New>(bytes, "test message");
    ASSERT_FALSE(got);
    EXPECT_EQ(got.error().code, ErrorCode::kCorrupt);
    EXPECT_NE(got.error().what.find("test message"), std::string::npos);
  }
}

}  // namespace
}  // namespace kvferry
