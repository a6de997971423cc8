#include "transport/shared_memory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>

namespace kvferry {
namespace {

using ::testing::HasSubstr;

bool exists(const std::string& name) { return std::filesystem::exists("/dev/shm" + name); }

TEST(SharedMemory, AnotherMappingSeesTheSameBytes) {
  const SharedMemory memory = SharedMemory::create("pool", 10'000).value();
  EXPECT_EQ(memory.bytes(), 10'000U);
  EXPECT_EQ(memory.data()[9'999], std::byte{0});
  const SharedMemory other = SharedMemory::open(memory.name()).value();
  EXPECT_EQ(other.bytes(), 10'000U);
  memory.data()[9'999] = std::byte{42};
  EXPECT_EQ(other.data()[9'999], std::byte{42});
}

TEST(SharedMemory, TheNameGoesWithItsCreatorAndMappingsOfOthersStayValid) {
  auto memory = std::make_unique<SharedMemory>(SharedMemory::create("pool", 4096).value());
  const std::string name = memory->name();
  const SharedMemory other = SharedMemory::open(name).value();
  EXPECT_TRUE(exists(name));
  memory.reset();
  EXPECT_FALSE(exists(name));
  other.data()[0] = std::byte{1};
  EXPECT_EQ(SharedMemory::open(name).error().code, ErrorCode::kNotFound);
}

TEST(SharedMemory, MovingKeepsOneOwner) {
  SharedMemory first = SharedMemory::create("pool", 4096).value();
  const std::string name = first.name();
  SharedMemory second = std::move(first);
  EXPECT_TRUE(exists(name));
  second = SharedMemory::create("pool", 4096).value();
  EXPECT_FALSE(exists(name));
  EXPECT_TRUE(exists(second.name()));
}

TEST(SharedMemory, AskingForMoreThanThereIsSaysHowMuchThereIs) {
  struct statvfs stats {};
  ASSERT_EQ(::statvfs("/dev/shm", &stats), 0);
  const std::uint64_t wanted_bytes = static_cast<std::uint64_t>(stats.f_blocks) * stats.f_frsize + 1;
  const Result<SharedMemory> refused = SharedMemory::create("pool", wanted_bytes);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kUnavailable);
  EXPECT_THAT(refused.error().what, HasSubstr("pool_bytes"));
  EXPECT_THAT(refused.error().what, HasSubstr(std::to_string(wanted_bytes)));
  EXPECT_THAT(refused.error().what, HasSubstr("bytes free"));
}

TEST(SharedMemory, BadLabelsAndSizesAreRefused) {
  for (const char* label : {"", "a/b", "a-b", "a b"})
    EXPECT_EQ(SharedMemory::create(label, 4096).error().code, ErrorCode::kInvalidArgument) << label;
  EXPECT_EQ(SharedMemory::create("pool", 0).error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(SharedMemory::create("pool", ~std::uint64_t{0}).error().code, ErrorCode::kInvalidArgument);
}

TEST(SharedMemory, TheNextCreatorRemovesWhatTheDeadLeftAndNothingElse) {
  int names[2];
  ASSERT_EQ(::pipe(names), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const Result<SharedMemory> memory = SharedMemory::create("pool", 4096);
    if (memory && ::write(names[1], memory->name().data(), memory->name().size()) > 0) ::raise(SIGKILL);
    ::_exit(1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status));
  char buffer[256] = {};
  ASSERT_GT(::read(names[0], buffer, sizeof(buffer) - 1), 0);
  ::close(names[0]);
  ::close(names[1]);
  ASSERT_TRUE(exists(buffer));
  const SharedMemory alive = SharedMemory::create("pool", 4096).value();
  EXPECT_FALSE(exists(buffer));
  const SharedMemory next = SharedMemory::create("pool", 4096).value();
  EXPECT_TRUE(exists(alive.name()));
}

}  // namespace
}  // namespace kvferry
