// Tests transfers between GPU memory of two processes, with the backends that move such memory within a host. Built
// twice: gpu_transfer_test has "gpu_ipc" and "ucx", gpu_nccl_pair has "nccl", whose two ranks on one GPU show that the
// protocol works, not how fast it is.
#include <gtest/gtest.h>

#include "tests/gpu/gpu_pair.h"
#include "transport/base/checksum.h"

namespace kvferry {
namespace {

constexpr std::uint64_t kBytes = 8 << 20, kBlockBytes = 16 << 10;

class GpuTransfer : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    Result<std::unique_ptr<GpuPair>> pair = GpuPair::start(GetParam(), kBytes);
    if (!pair && pair.error().code == ErrorCode::kUnavailable) GTEST_SKIP() << "needs a GPU: " << pair.error().what;
    ASSERT_TRUE(pair) << pair.error().what;
    pair_ = std::move(*pair);
  }
  std::unique_ptr<GpuPair> pair_;
};

TEST_P(GpuTransfer, PullsAndPushesBlocksInAnyOrder) {
  const std::vector<CopyRange> blocks = shuffled_blocks(kBytes, kBlockBytes, 1);
  std::vector<std::byte> expected(kBytes), far(kBytes);
  for (std::uint64_t i = 0; i < kBytes; ++i) far[i] = far_byte(i);
  std::vector<std::uint64_t> checksums;
  for (const CopyRange& block : blocks) {
    checksums.push_back(chunk_checksum(std::span(far).subspan(block.remote_offset, block.bytes)));
    std::copy_n(far.begin() + static_cast<std::ptrdiff_t>(block.remote_offset), block.bytes,
                expected.begin() + static_cast<std::ptrdiff_t>(block.local_offset));
  }
  Completion done = pair_->move(Direction::kPull, blocks, checksums, "pulled");
  ASSERT_EQ(done.code, ErrorCode::kOk) << done.what;
  EXPECT_EQ(pair_->read(), expected);

  std::vector<std::byte> pushed(kBytes);
  for (std::uint64_t i = 0; i < kBytes; ++i) pushed[i] = static_cast<std::byte>(i * 7 >> 4);
  pair_->write(pushed);
  done = pair_->move(Direction::kPush, {{0, 0, kBytes}}, {chunk_checksum(pushed)}, "pushed");
  ASSERT_EQ(done.code, ErrorCode::kOk) << done.what;
  pair_->write(std::vector<std::byte>(kBytes));
  done = pair_->move(Direction::kPull, {{0, 0, kBytes}}, {}, "");
  ASSERT_EQ(done.code, ErrorCode::kOk) << done.what;
  EXPECT_EQ(pair_->read(), pushed);
}

TEST_P(GpuTransfer, SeesBytesThatDifferFromTheirChecksum) {
  const Completion done = pair_->move(Direction::kPull, {{0, 0, kBlockBytes}, {kBlockBytes, 0, 0}}, {1, 2}, "no");
  EXPECT_EQ(done.code, ErrorCode::kCorrupt) << done.what;
  EXPECT_EQ(done.corrupt_ranges, (std::vector<std::uint32_t>{0, 1}));
}

INSTANTIATE_TEST_SUITE_P(Backends, GpuTransfer, ::testing::Values(KVFERRY_TEST_BACKENDS),
                         [](const auto& one) { return std::string(one.param); });

}  // namespace
}  // namespace kvferry
