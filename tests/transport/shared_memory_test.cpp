#include "transport/shared_memory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <memory>

#include "transport/base/memory/large_memory.h"

namespace kvferry {
namespace {

using ::testing::HasSubstr;

TEST(SharedMemory, AnotherMappingSeesTheSameBytes) {
  const SharedMemory memory = SharedMemory::create("pool", 10'000).value();
  EXPECT_EQ(memory.bytes(), 10'000U);
  EXPECT_EQ(memory.data()[9'999], std::byte{0});
  const SharedMemory other = SharedMemory::open(memory.name()).value();
  EXPECT_EQ(other.bytes(), 10'000U);
  memory.data()[9'999] = std::byte{42};
  EXPECT_EQ(other.data()[9'999], std::byte{42});
}

TEST(SharedMemory, MappingsOfOthersOutliveItsCreator) {
  auto memory = std::make_unique<SharedMemory>(SharedMemory::create("pool", 4096).value());
  const std::string name = memory->name();
  const SharedMemory other = SharedMemory::open(name).value();
  memory.reset();
  other.data()[0] = std::byte{1};
  EXPECT_EQ(SharedMemory::open(name).error().code, ErrorCode::kNotFound);
}

TEST(SharedMemory, MovingKeepsOneOwner) {
  SharedMemory first = SharedMemory::create("pool", 4096).value();
  first.data()[7] = std::byte{7};
  SharedMemory second = std::move(first);
  EXPECT_EQ(second.data()[7], std::byte{7});
  second = SharedMemory::create("pool", 4096).value();
  EXPECT_EQ(second.data()[7], std::byte{0});
}

TEST(SharedMapping, AllItsPagesAreThereBeforeItIsUsed) {
  constexpr std::uint64_t kBytes = 1 << 20;
  const SharedMapping pages = SharedMapping::create("pages", kBytes).value();
  struct stat stats {};
  ASSERT_EQ(::fstat(pages.fd(), &stats), 0);
  EXPECT_GE(static_cast<std::uint64_t>(stats.st_blocks) * 512, kBytes);
}

TEST(SharedMemory, ItCannotShrinkUnderAnybody) {
  const SharedMemory memory = SharedMemory::create("pool", 8192).value();
  EXPECT_NE(::ftruncate(memory.region().fd, 4096), 0);
  memory.data()[8191] = std::byte{1};
}

/// Reserves huge pages while this object lives, in addition to those that are reserved already.
class HugePages {
 public:
  explicit HugePages(int count) {
    std::ifstream(kFile) >> before_;
    std::ofstream(kFile) << before_ + count;
  }
  ~HugePages() { std::ofstream(kFile) << before_; }

 private:
  static constexpr const char* kFile = "/proc/sys/vm/nr_hugepages";
  int before_ = 0;
};

TEST(SharedMemory, TakesHugePagesThatAreSetAside) {
  constexpr std::uint64_t kPoolBytes = 3 * kHugePageBytes + 4096;
  const HugePages pages(8);
  const std::uint64_t reserved = reserved_huge_page_bytes();
  if (reserved < kPoolBytes) GTEST_SKIP() << "nobody may set huge pages aside here: " << reserved << " bytes are";
  {
    const SharedMemory memory = SharedMemory::create("pool", kPoolBytes).value();
    EXPECT_EQ(memory.bytes(), kPoolBytes);
    EXPECT_EQ(huge_page_bytes(memory.span()), kPoolBytes);
    EXPECT_EQ(reserved_huge_page_bytes(), reserved - 4 * kHugePageBytes);
    EXPECT_NE(::ftruncate(memory.region().fd, 0), 0) << "it can shrink";
    const SharedMemory other = SharedMemory::open(memory.name()).value();
    memory.data()[kPoolBytes - 1] = std::byte{42};
    EXPECT_EQ(other.data()[kPoolBytes - 1], std::byte{42});
    EXPECT_TRUE(SharedMemory::create("pool", reserved)) << "ordinary pages do when there are not enough huge ones";
  }
  EXPECT_EQ(reserved_huge_page_bytes(), reserved) << "all are given back";
}

/// Returns whether the kernel makes huge pages of a shared mapping when it is asked to.
bool makes_huge_pages() {
  constexpr std::uint64_t kBytes = 2 * kHugePageBytes;
  const OwnedFd file(::memfd_create("probe", MFD_CLOEXEC));
  EXPECT_EQ(::ftruncate(file.get(), kBytes), 0);
  void* const memory = map_for_huge_pages(file.get(), 0, kBytes, PROT_READ | PROT_WRITE);
  std::memset(memory, 1, kBytes);
  const bool made = ::madvise(memory, kBytes, 25) == 0;  // 25: MADV_COLLAPSE
  ::munmap(memory, kBytes);
  return made;
}

TEST(SharedMemory, HasHugePagesInTheMappingsOfAllIfTheKernelMakesThem) {
  if (!makes_huge_pages()) GTEST_SKIP() << "this kernel makes no huge pages of shared memory";
  constexpr std::uint64_t kPoolBytes = 4 * kHugePageBytes + 4096;
  const SharedMemory memory = SharedMemory::create("pool", kPoolBytes).value();
  EXPECT_GE(huge_page_bytes(memory.span()), 4 * kHugePageBytes);
  const SharedMemory other = SharedMemory::open(memory.name()).value();
  std::memset(other.data(), 7, kPoolBytes);
  EXPECT_GE(huge_page_bytes(other.span()), 4 * kHugePageBytes);
  EXPECT_EQ(memory.data()[kPoolBytes - 1], std::byte{7});
}

TEST(SharedMapping, OfAPartOfAFileHasHugePagesToo) {
  if (!makes_huge_pages()) GTEST_SKIP() << "this kernel makes no huge pages of shared memory";
  constexpr std::uint64_t kOffset = kHugePageBytes / 2, kBytes = 3 * kHugePageBytes;
  const SharedMapping whole = SharedMapping::create("pages", kOffset + kBytes).value();
  const SharedMapping part = SharedMapping::map(OwnedFd(::dup(whole.fd())), kOffset, kBytes).value();
  std::memset(part.span().data(), 7, kBytes);
  EXPECT_GE(huge_page_bytes(part.span()), 2 * kHugePageBytes);
  EXPECT_EQ(whole.span()[kOffset], std::byte{7});
  EXPECT_EQ(whole.span()[kOffset - 1], std::byte{0});
}

TEST(SharedMemory, AskingForMoreThanThereIsSaysHowMuchThereIs) {
  const std::uint64_t wanted_bytes = std::uint64_t{1} << 50;
  const Result<SharedMemory> refused = SharedMemory::create("pool", wanted_bytes);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kUnavailable);
  EXPECT_THAT(refused.error().what, HasSubstr("pool_bytes"));
  EXPECT_THAT(refused.error().what, HasSubstr(std::to_string(wanted_bytes)));
  EXPECT_THAT(refused.error().what, HasSubstr("bytes are free"));
}

TEST(SharedMemory, BadLabelsAndSizesAreRefused) {
  for (const char* label : {"", "a/b", "a-b", "a b"})
    EXPECT_EQ(SharedMemory::create(label, 4096).error().code, ErrorCode::kInvalidArgument) << label;
  EXPECT_EQ(SharedMemory::create("pool", 0).error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(SharedMemory::create("pool", ~std::uint64_t{0}).error().code, ErrorCode::kInvalidArgument);
}

TEST(SharedMapping, IsWrittenOnlyByItsMakerIfItIsForReaders) {
  const SharedMapping page = SharedMapping::create_for_readers("page", 4096).value();
  const auto map_again = [&](bool is_writable) {
    return SharedMapping::map(OwnedFd(::dup(page.fd())), 0, 4096, is_writable);
  };
  EXPECT_FALSE(map_again(true));
  EXPECT_LT(::pwrite(page.fd(), "x", 1, 0), 0);
  const SharedMapping seen = map_again(false).value();
  page.span()[7] = std::byte{7};
  EXPECT_EQ(seen.span()[7], std::byte{7});
}

}  // namespace
}  // namespace kvferry
