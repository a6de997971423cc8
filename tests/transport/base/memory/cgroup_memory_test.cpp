#include "transport/base/memory/cgroup_memory.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

namespace kvferry {
namespace {

constexpr std::uint64_t kNoLimit = UINT64_MAX;

/// A folder with files in the kernel's format.
class CgroupMemory : public ::testing::Test {
 protected:
  CgroupMemory() {
    std::string name = (std::filesystem::temp_directory_path() / "kvferry-cgroup-XXXXXX").string();
    root_ = ::mkdtemp(name.data());
  }
  ~CgroupMemory() override { std::filesystem::remove_all(root_); }

  void write(const std::string& file, const std::string& text) const {
    std::filesystem::create_directories((root_ / file).parent_path());
    std::ofstream(root_ / file) << text;
  }
  std::uint64_t bytes_left(const std::string& own) const {
    write("own", own);
    return bytes_left_in_cgroups(root_ / "own", root_ / "mount");
  }

  std::filesystem::path root_;
};

TEST_F(CgroupMemory, TheLeastOfAllNestedGroupsCounts) {
  write("mount/pods/memory.max", "1000\n");
  write("mount/pods/memory.current", "700\n");
  write("mount/pods/mine/memory.max", "500\n");
  write("mount/pods/mine/memory.current", "100\n");
  write("mount/pods/mine/below/memory.max", "max\n");
  EXPECT_EQ(bytes_left("0::/pods/mine/below\n"), 300u);
  write("mount/pods/memory.current", "100\n");
  EXPECT_EQ(bytes_left("0::/pods/mine/below\n"), 400u);
}

TEST_F(CgroupMemory, PageCacheIsFree) {
  write("mount/memory.max", "1000\n");
  write("mount/memory.current", "900\n");
  write("mount/memory.stat", "anon 100\nfile 800\nshmem 100\ninactive_file 400\nactive_file 300\nslab 5\n");
  EXPECT_EQ(bytes_left("0::/\n"), 800u);
}

TEST_F(CgroupMemory, AFullGroupHasNothingLeftHoweverItsNumbersLook) {
  write("mount/memory.max", "1000\n");
  write("mount/memory.current", "1200\n");
  EXPECT_EQ(bytes_left("0::/\n"), 0u);
  write("mount/memory.stat", "inactive_file 5000\n");  // this file is read after the others
  EXPECT_EQ(bytes_left("0::/\n"), 1000u);
}

TEST_F(CgroupMemory, Version1IsRead) {
  write("mount/memory/docker/memory.limit_in_bytes", "1000\n");
  write("mount/memory/docker/memory.usage_in_bytes", "600\n");
  write("mount/memory/docker/memory.stat", "inactive_file 7\ntotal_inactive_file 100\ntotal_active_file 50\n");
  EXPECT_EQ(bytes_left("12:cpu,cpuacct:/elsewhere\n4:hugetlb,memory:/docker\n0::/\n"), 550u);
}

TEST_F(CgroupMemory, APathThatIsNotMountedMeansTheRoot) {
  write("mount/memory.max", "1000\n");
  write("mount/memory.current", "400\n");
  EXPECT_EQ(bytes_left("0::/kubepods/pod1/container\n"), 600u);
  EXPECT_EQ(bytes_left("0::/../other\n"), 600u);
}

TEST_F(CgroupMemory, WithoutLimitsNothingIsLimited) {
  EXPECT_EQ(bytes_left("0::/\n"), kNoLimit);
  EXPECT_EQ(bytes_left("nonsense\n"), kNoLimit);
  EXPECT_EQ(bytes_left_in_cgroups(root_ / "missing", root_ / "missing"), kNoLimit);
  EXPECT_GT(bytes_left_in_cgroups(), 0u);
}

}  // namespace
}  // namespace kvferry
