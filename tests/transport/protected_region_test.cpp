// Tests memory that peers may always read, but may write only with a grant.
#include <gtest/gtest.h>

#include <fstream>
#include <string_view>
#include <tuple>
#include <vector>

#include "tests/transport/backends.h"
#include "tests/transport/transport_fixture.h"
#include "transport/shared_memory.h"

namespace kvferry {
namespace {

constexpr std::uint64_t kPoolBytes = 256 << 10;

/// Returns the names of the backends that promise to refuse writes without a grant.
std::vector<std::string_view> backends_with_grants() {
  std::vector<std::string_view> names;
  const auto add = [&]<class Backend>(Backend) {
    if (Backend::kHasGrants && Backend::kEnforcesUnregister) names.push_back(Backend::kName);
  };
  std::apply([&](auto... backends) { (add(backends), ...); }, ProcessBackends());
  return names;
}

class ProtectedRegion : public ::testing::TestWithParam<std::string_view> {
 protected:
  ErrorCode move(Direction direction, const std::string& remote, std::uint64_t bytes) {
    const PeerId peer = reader_->connect(owner_->address()).value();
    EXPECT_TRUE(reader_->submit({peer, direction, local_, remote, {{0, 0, bytes}}, ""}));
    const std::vector<Completion> completions = wait_completions(*reader_, 1);
    return completions.size() == 1 ? completions[0].code : ErrorCode::kInternal;
  }
  /// Returns how often this process has mapped the pool with these rights.
  static int num_mappings(const std::string& rights) {
    std::ifstream maps("/proc/self/maps");
    int count = 0;
    for (std::string line; std::getline(maps, line);)
      count += line.find("kvferry-protected") != std::string::npos && line.find(rights) != std::string::npos;
    return count;
  }

  SharedMemory pool_ = SharedMemory::create("protected", kPoolBytes).value();
  std::vector<std::byte> memory_ = std::vector<std::byte>(kPoolBytes, std::byte{'m'});
  std::unique_ptr<Transport> owner_ = make_backend(GetParam());
  std::unique_ptr<Transport> reader_ = make_backend(GetParam());
  RegionId local_ = reader_->register_region(memory_.data(), memory_.size()).value();
};

TEST_P(ProtectedRegion, IsWrittenOnlyWhereAPeerHasAGrant) {
  MemoryRegion pool = pool_.region();
  pool.needs_grant_to_write = true;
  const RegionId region = owner_->register_region(pool).value();
  const std::string all = owner_->export_region(region).value();
  EXPECT_EQ(move(Direction::kPush, all, kPoolBytes), ErrorCode::kRefused);
  EXPECT_EQ(pool_.data()[0], std::byte{0});
  EXPECT_EQ(move(Direction::kPull, all, 64), ErrorCode::kOk);
  const GrantId grant = owner_->grant(region, 4096, 64).value();
  EXPECT_EQ(move(Direction::kPush, owner_->export_grant(grant).value(), 64), ErrorCode::kOk);
  EXPECT_EQ(pool_.data()[4096 + 63], std::byte{0});  // the pushed bytes are the zeros that were pulled before
  memory_[63] = std::byte{'w'};
  EXPECT_EQ(move(Direction::kPush, owner_->export_grant(grant).value(), 64), ErrorCode::kOk);
  EXPECT_EQ(pool_.data()[4096 + 63], std::byte{'w'});
  EXPECT_EQ(move(Direction::kPush, all, 64), ErrorCode::kRefused) << "a grant opened the rest of the region";
}

INSTANTIATE_TEST_SUITE_P(Backends, ProtectedRegion, ::testing::ValuesIn(backends_with_grants()),
                         [](const auto& one) { return std::string(one.param); });

class ReadersMapping : public ProtectedRegion {};
TEST_P(ReadersMapping, CannotBeWritten) {
  MemoryRegion pool = pool_.region();
  pool.needs_grant_to_write = true;
  const RegionId region = owner_->register_region(pool).value();
  EXPECT_EQ(move(Direction::kPull, owner_->export_region(region).value(), 64), ErrorCode::kOk);
  EXPECT_EQ(num_mappings(" r--s "), 1);
  EXPECT_EQ(num_mappings(" rw-s "), 1) << "the owner's";
}
INSTANTIATE_TEST_SUITE_P(Backends, ReadersMapping, ::testing::Values("shm"));

}  // namespace
}  // namespace kvferry
