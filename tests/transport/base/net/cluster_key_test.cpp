#include "transport/base/net/cluster_key.h"

#include <gmock/gmock.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <functional>
#include <vector>

#include "tests/transport/base/net/key_file.h"
#include "transport/base/log.h"

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
              HasSubstr("cluster_key_file /nowhere/cluster.key: the file can't be read: No such"));
  EXPECT_THAT(refusal("/tmp"), HasSubstr("is not a regular file"));
}

TEST_F(ClusterKeyFile, APipeDoesNotBlockTheReader) {
  std::remove(path_.c_str());
  ASSERT_EQ(::mkfifo(path_.c_str(), 0600), 0);
  EXPECT_THAT(refusal(path_), HasSubstr("is not a regular file"));
}

std::vector<ClusterKey::Derived> derived(const ClusterKey& key) {
  std::vector<ClusterKey::Derived> all;
  for (const ClusterKey& one : key.accepted()) all.push_back(one.derived("x"));
  return all;
}

TEST(ClusterKeys, AFileOfTwoHasTheKeyInUseFirst) {
  const std::vector<std::string> keys = {std::string(64, 'a') + "\n",
                                         std::string("\0\n\xff", 3) + std::string(40, 'b')};
  EXPECT_EQ(parse_cluster_keys(format_cluster_keys(keys)).value(), keys);
  EXPECT_EQ(format_cluster_keys({keys[1]}), keys[1]) << "a file with one key has nothing but the key";
  const KeyFile file(::testing::TempDir(), keys);
  const ClusterKey key = file.read().value();
  EXPECT_EQ(key.derived("x"), ClusterKey(keys[0]).derived("x"));
  EXPECT_EQ(derived(key), (std::vector{ClusterKey(keys[0]).derived("x"), ClusterKey(keys[1]).derived("x")}));
}

TEST(ClusterKeys, AListThatIsNoneIsRefusedInOneSentence) {
  const std::string list = format_cluster_keys({std::string(32, 'a'), std::string(32, 'b')});
  const std::size_t head = list.find('\n') + 1, line = 65;
  const auto why = [](const std::string& content) { return parse_cluster_keys(content).error().what; };
  EXPECT_THAT(why(list.substr(0, head)), HasSubstr("lists 0 keys; allowed: two different ones"));
  EXPECT_THAT(why(list.substr(0, head + line)), HasSubstr("lists 1 keys"));
  EXPECT_THAT(why(list + list.substr(head)), HasSubstr("lists 4 keys"));
  EXPECT_THAT(why(list.substr(0, head + line) + list.substr(head, line)), HasSubstr("two different ones"));
  EXPECT_THAT(why(list.substr(0, list.size() - 1)), HasSubstr("line 3 is no key in hexadecimal"));
  EXPECT_THAT(why(list.substr(0, head) + "xy" + list.substr(head + 2)), HasSubstr("line 2 is no key"));
  EXPECT_THAT(why(list.substr(0, head) + list.substr(head + 2)), HasSubstr("has 31 bytes; allowed: 32 to 65536"));
}

TEST(ClusterKeys, AChangedFileIsTakenWithinASecond) {
  KeyFile file(::testing::TempDir(), {kOldKey});
  const ClusterKey key = file.read().value(), copy = key;
  const std::uint64_t version = key.version();
  const SteadyClock clock;
  const TimeNs changed_at = clock.now();
  file.write({kNewKey});
  EXPECT_TRUE(reaches([&] { return key.version() != version; }));
  EXPECT_LT(clock.now() - changed_at, kSecond);
  EXPECT_EQ(derived(copy), std::vector{ClusterKey(kNewKey).derived("x")}) << "copies share the keys";
}

TEST(ClusterKeys, AFileThatCantBeUsedChangesNothingAndIsLoggedOnce) {
  KeyFile file(::testing::TempDir(), {kNewKey, kOldKey});
  const ClusterKey key = file.read().value();
  const auto both = derived(key);
  const std::vector<std::function<void()>> damages = {[&] { file.write_content("short"); },
                                                      [&] { ::chmod(file.path().c_str(), 0644); },
                                                      [&] { std::remove(file.path().c_str()); }};
  ::testing::internal::CaptureStderr();
  for (const auto& damage : damages) {
    damage();
    std::this_thread::sleep_for(std::chrono::nanoseconds(5 * ClusterKey::kLookEveryNs));
    EXPECT_EQ(derived(key), both);
  }
  log().flush();
  const std::string said = ::testing::internal::GetCapturedStderr();
  for (const char* const why :
       {"the key has 5 bytes", "the file has mode 0644", "the file can't be read: No such file"})
    EXPECT_THAT(said, HasSubstr(fmt::format("cluster_key_file {}: {}", file.path(), why)));
  std::size_t num_said = 0;
  for (std::size_t at = 0; (at = said.find("the former keys stay in use", at)) != std::string::npos; ++at) ++num_said;
  EXPECT_EQ(num_said, damages.size()) << said;
  file.write({kNewKey});
  EXPECT_TRUE(reaches([&] { return derived(key).size() == 1; }));
}

}  // namespace
}  // namespace kvferry::net
