#include "transport/base/net/cluster_key.h"

#include <gmock/gmock.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>

namespace kvferry::net {
namespace {

using ::testing::HasSubstr;

std::string hex(const ClusterKey::Derived& key) { return fmt::format("{:02x}", fmt::join(key, "")); }

TEST(ClusterKey, DerivesByHmacSha256) {
  // Test case 2 of RFC 4231.
  EXPECT_EQ(hex(ClusterKey("Jefe").derived("what do ya want for nothing?")),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
}

TEST(ClusterKey, EachPurposeAndEachKeyHasItsOwnDerivedKey) {
  const ClusterKey key(std::string(64, 'a')), other(std::string(63, 'a') + "b");
  EXPECT_EQ(key.derived("x"), ClusterKey(std::string(64, 'a')).derived("x"));
  EXPECT_NE(key.derived("x"), key.derived("y"));
  EXPECT_NE(key.derived("x"), other.derived("x"));
}

class ClusterKeyFile : public ::testing::Test {
 protected:
  ~ClusterKeyFile() override { std::remove(path_.c_str()); }

  std::string written(const std::string& bytes, mode_t mode) {
    std::remove(path_.c_str());
    std::ofstream(path_) << bytes;
    ::chmod(path_.c_str(), mode);
    return path_;
  }
  static std::string refusal(const std::string& file) {
    const auto key = read_cluster_key(file);
    if (key) return "";
    EXPECT_EQ(key.error().code, ErrorCode::kInvalidArgument);
    return key.error().what;
  }

  std::string path_ = ::testing::TempDir() + fmt::format("cluster-key-test-{}", ::getpid());
};

TEST_F(ClusterKeyFile, AllItsBytesAreTheKey) {
  for (const std::size_t size : {ClusterKey::kBytesMin, std::size_t{65}, ClusterKey::kBytesMax}) {
    const std::string bytes = std::string(size - 1, 'k') + "\n";
    for (const mode_t mode : {0600U, 0400U}) {
      const auto key = read_cluster_key(written(bytes, mode)).value();
      ASSERT_TRUE(key);
      EXPECT_EQ(key->derived("x"), ClusterKey(bytes).derived("x"));
    }
  }
}

TEST_F(ClusterKeyFile, NoPathMeansNoKey) { EXPECT_FALSE(read_cluster_key("").value()); }

TEST_F(ClusterKeyFile, WhatOthersCanReadOrHasAnotherSizeIsRefusedInOneSentence) {
  const std::string good(64, 'k');
  for (const mode_t mode : {0644U, 0640U, 0604U, 0660U, 0700U, 04600U})
    EXPECT_THAT(refusal(written(good, mode)), HasSubstr(fmt::format("mode {:04o}; allowed: 0600 and 0400", mode)));
  EXPECT_THAT(refusal(written(std::string(31, 'k'), 0600)), HasSubstr("has 31 bytes; allowed: 32 to 65536"));
  EXPECT_THAT(refusal(written(std::string(65537, 'k'), 0600)), HasSubstr("has more than 65536 bytes"));
  EXPECT_THAT(refusal(written("", 0600)), HasSubstr("has 0 bytes"));
  EXPECT_THAT(refusal("/nowhere/cluster.key"),
              HasSubstr("cluster_key_file /nowhere/cluster.key can't be read: No such"));
  EXPECT_THAT(refusal("/tmp"), HasSubstr("is not a file"));
}

TEST_F(ClusterKeyFile, APipeDoesNotBlockTheReader) {
  std::remove(path_.c_str());
  ASSERT_EQ(::mkfifo(path_.c_str(), 0600), 0);
  EXPECT_THAT(refusal(path_), HasSubstr("is not a file"));
}

}  // namespace
}  // namespace kvferry::net
