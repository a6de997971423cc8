// The planner at its edges; what it promises while all goes well is in the contract suite (backend "auto").
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "tests/device/sim_device.h"
#include "tests/transport/backends.h"
#include "tests/transport/transport_fixture.h"

namespace kvferry {
namespace {

// Every probe pulls into memory of its own. Under the address sanitizer this sees a copy into memory that is gone.
TEST(Planner, EndsAtAnyMomentOfItsProbes) {
  const std::unique_ptr<Transport> peer = make_backend("auto");
  for (int tenths_of_ms = 0; tenths_of_ms < 200; tenths_of_ms += 7) {
    const std::unique_ptr<Transport> transport = make_backend("auto");
    ASSERT_TRUE(transport->connect(peer->address()));
    std::this_thread::sleep_for(std::chrono::microseconds(100 * tenths_of_ms));
  }
}

/// Pulls all of `remote` into `local` and waits.
Completion pull_all(Transport& transport, PeerId peer, RegionId local, const std::string& remote, std::uint64_t bytes) {
  const Result<TransferId> id =
      transport.submit({peer, Direction::kPull, local, remote, {{0, 0, bytes}}, "", Priority::kNormal, false, {}});
  EXPECT_TRUE(id) << id.error().what;
  std::vector<Completion> completions;
  while (id && completions.empty()) {
    transport.wait(kSecond);
    completions = transport.poll();
  }
  return completions.empty() ? Completion{} : completions.front();
}

TEST(Planner, MovesGpuMemoryByPathsThatReachIt) {
  constexpr std::uint64_t kBytes = 1 << 20;
  SimDevice device(1, SimDevice::Drive::kInBackground);
  TransportOptions options;
  options.device = &device;
  std::vector<std::byte> in_host(kBytes, std::byte{3});
  std::byte* const here = device.allocate(MemoryKind::kDevice, kBytes).value();
  std::byte* const there = device.allocate(MemoryKind::kDevice, kBytes).value();
  std::fill_n(there, kBytes, std::byte{2});
  {
    const std::unique_ptr<Transport> a = make_transport(options).value(), b = make_transport(options).value();
    const RegionId local = a->register_region({here, kBytes, -1, 0, &device}).value();
    const RegionId on_device = b->register_region({there, kBytes, -1, 0, &device}).value();
    const RegionId on_host = b->register_region(in_host.data(), kBytes).value();
    const PeerId peer = a->connect(b->address()).value();
    for (const auto& [remote, expected] : {std::pair{on_device, std::byte{2}}, std::pair{on_host, std::byte{3}}}) {
      const Completion done = pull_all(*a, peer, local, b->export_region(remote).value(), kBytes);
      ASSERT_EQ(done.code, ErrorCode::kOk) << done.what;
      EXPECT_EQ(std::count(here, here + kBytes, expected), static_cast<std::ptrdiff_t>(kBytes));
    }
    const auto deadline = std::chrono::steady_clock::now() + kPatience;
    while (a->describe().find("GPU memory by") == std::string::npos && std::chrono::steady_clock::now() < deadline)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    EXPECT_NE(a->describe().find("GPU memory by"), std::string::npos) << a->describe();
    const Result<GrantId> grant = a->grant(local, 0, 64);
    ASSERT_FALSE(grant);
    EXPECT_EQ(grant.error().code, ErrorCode::kUnavailable) << grant.error().what;
  }
  device.release(MemoryKind::kDevice, here);
  device.release(MemoryKind::kDevice, there);
  EXPECT_EQ(device.num_alive(), 0U);
}

TEST(Planner, SaysWhyNoPathMovesGpuMemory) {
  SimDevice device(1);
  std::byte* const memory = device.allocate(MemoryKind::kDevice, 64).value();
  TransportOptions options;
  options.path = Path::kTcp;
  const std::unique_ptr<Transport> transport = make_transport(options).value();
  const Result<RegionId> region = transport->register_region({memory, 64, -1, 0, &device});
  ASSERT_FALSE(region);
  EXPECT_EQ(region.error().code, ErrorCode::kUnavailable);
  EXPECT_NE(region.error().what.find("simulated GPU"), std::string::npos) << region.error().what;
  device.release(MemoryKind::kDevice, memory);
}

}  // namespace
}  // namespace kvferry
