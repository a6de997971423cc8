// Tests the promises of Device with the simulated device. tests/gpu tests the same promises with CUDA.
#include "tests/device/sim_device.h"

#include <gtest/gtest.h>

#include <cstring>

#include "transport/base/checksum.h"

namespace kvferry {
namespace {

constexpr std::uint64_t kBytes = 10'000;

/// Copies a to b in one stream and b to c in another. Returns whether c equals a at the end.
bool copies_in_order(std::uint32_t seed, bool with_event) {
  SimDevice device(seed);
  std::byte* const memory = device.allocate(MemoryKind::kDevice, 3 * kBytes).value();
  std::memset(memory, 1, kBytes);
  const DeviceStream first = device.make_stream().value(), second = device.make_stream().value();
  const DeviceCopy to_b[] = {{memory + kBytes, memory, kBytes}};
  const DeviceCopy to_c[] = {{memory + 2 * kBytes, memory + kBytes, kBytes}};
  EXPECT_TRUE(device.copy(to_b, first));
  if (with_event) {
    const DeviceEvent copied = DeviceEvent::record(device, first).value();
    EXPECT_TRUE(copied.make_wait(second));
  }
  EXPECT_TRUE(device.copy(to_c, second));
  const DeviceEvent done = DeviceEvent::record(device, second).value();
  EXPECT_TRUE(done.wait());
  const bool is_equal = std::memcmp(memory, memory + 2 * kBytes, kBytes) == 0;
  device.drop_stream(first);
  device.drop_stream(second);
  device.release(MemoryKind::kDevice, memory);
  return is_equal;
}

TEST(SimDevice, EventsOrderStreams) {
  for (std::uint32_t seed = 0; seed < 100; ++seed) EXPECT_TRUE(copies_in_order(seed, true)) << seed;
}

TEST(SimDevice, WithoutAnEventTheOrderIsOpen) {
  int wrong = 0;
  for (std::uint32_t seed = 0; seed < 100; ++seed) wrong += copies_in_order(seed, false) ? 0 : 1;
  EXPECT_GT(wrong, 10);
  EXPECT_LT(wrong, 90);
}

TEST(SimDevice, HashesWhatIsThereInTheStreamsOrder) {
  SimDevice device(1, SimDevice::Drive::kInBackground);
  std::byte* const memory = device.allocate(MemoryKind::kDevice, 2 * kBytes).value();
  std::memset(memory, 1, kBytes);
  const DeviceCopy copy[] = {{memory + kBytes, memory, kBytes}};
  const std::span<const std::byte> range(memory + kBytes, kBytes);
  ASSERT_TRUE(device.copy(copy, nullptr));
  const auto sums = device.checksums(std::span(&range, 1), nullptr).value();
  const std::vector<std::uint64_t> taken = sums->take().value();
  EXPECT_EQ(taken, std::vector<std::uint64_t>{chunk_checksum(range)});
  EXPECT_TRUE(sums->is_done().value());
  device.release(MemoryKind::kDevice, memory);
}

TEST(SimDevice, RefusesWhenAskedTo) {
  SimDevice device(1);
  device.refuse_next(1);
  EXPECT_FALSE(device.make_stream());
  const DeviceStream stream = device.make_stream().value();
  EXPECT_EQ(device.num_alive(), 1U);
  device.drop_stream(stream);
  EXPECT_EQ(device.num_alive(), 0U);
}

}  // namespace
}  // namespace kvferry
