// Tests special cases of the planner. The contract suite tests its normal behaviour (backend "auto").
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "tests/device/sim_device.h"
#include "tests/transport/backends.h"
#include "tests/transport/transport_fixture.h"
#include "tests/transport/ucx_over_tcp.h"
#include "transport/planner/plan_address.h"
#include "transport/planner/prober.h"

namespace kvferry {
namespace {

// Every probe pulls into memory of its own. The address sanitizer reports a copy into memory that was freed.
TEST(Planner, EndsAtAnyMomentOfItsProbes) {
  const std::unique_ptr<Transport> peer = make_backend("auto");
  for (int tenths_of_ms = 0; tenths_of_ms < 200; tenths_of_ms += 7) {
    const std::unique_ptr<Transport> transport = make_backend("auto");
    ASSERT_TRUE(transport->connect(peer->address()));
    std::this_thread::sleep_for(std::chrono::microseconds(100 * tenths_of_ms));
  }
}

/// Pulls all of `remote` into `local`, and waits for the completion.
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
  let_ucx_use_tcp();  // no other backend here moves bytes between a GPU and a host
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

TEST(Planner, DisconnectKeepsTheConnectionsOfAnotherPeer) {
  constexpr std::uint64_t kBytes = 1 << 20;
  std::vector<std::byte> here(kBytes), there(kBytes, std::byte{5});
  const std::unique_ptr<Transport> transport = make_backend("auto"), remote = make_backend("auto");
  const RegionId local = transport->register_region(here.data(), kBytes).value();
  const std::string region = remote->export_region(remote->register_region(there.data(), kBytes).value()).value();
  // Another address with the same addresses of backends. After a lost connection, two peers share these.
  planner::Address address = decode<planner::Address>(remote->address(), "address").value();
  address.probes.clear();
  const PeerId first = transport->connect(remote->address()).value();
  const PeerId second = transport->connect(encode(address)).value();
  ASSERT_NE(first, second);
  transport->disconnect(first);
  EXPECT_EQ(transport->submit({first, Direction::kPull, local, region, {{0, 0, 1}}, ""}).error().code,
            ErrorCode::kInvalidArgument);
  EXPECT_EQ(pull_all(*transport, second, local, region, kBytes).code, ErrorCode::kOk);
  EXPECT_TRUE(here == there);
  transport->disconnect(second);
  EXPECT_EQ(transport->describe().find("; peer "), std::string::npos) << transport->describe();
  const PeerId third = transport->connect(remote->address()).value();
  EXPECT_EQ(pull_all(*transport, third, local, region, kBytes).code, ErrorCode::kOk);
}

TEST(Planner, TellsTheRateThatItMeasured) {
  const std::unique_ptr<Transport> transport = make_backend("auto"), remote = make_backend("auto");
  const PeerId peer = transport->connect(remote->address()).value();
  for (int i = 0; i < 1000 && transport->measured_rate(peer, "shm") == 0; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  EXPECT_GT(transport->measured_rate(peer, "shm"), 1e6);
  EXPECT_GT(transport->measured_rate(peer, "tcp"), 1e6);
  EXPECT_EQ(transport->measured_rate(peer, "tcp/of some kind"), transport->measured_rate(peer, "tcp"));
  EXPECT_EQ(transport->measured_rate(peer, "carrier pigeon"), 0);
  EXPECT_EQ(transport->measured_rate(PeerId{peer.value + 1}, "shm"), 0);
}

TEST(Planner, NamesTheClassesOfMemoryWhosePathsItHasMeasured) {
  using planner::MemoryClass;
  planner::Measurements found;
  EXPECT_EQ(found.describe(), "not measured yet");
  found.of(MemoryClass::kDevice) = {{Path::kGpuIpc, 20.5, ""}, {Path::kUcx, 0, "no device"}};
  EXPECT_EQ(found.describe(), "GPU memory by gpu_ipc 20.5 GB/s, no ucx (no device)");
  found.of(MemoryClass::kOther) = {{Path::kTcp, 2, ""}};
  found.of(MemoryClass::kShared) = {{Path::kShm, 9.5, ""}};
  EXPECT_EQ(found.describe(),
            "pools by shm 9.5 GB/s; other memory by tcp 2.0 GB/s; GPU memory by gpu_ipc 20.5 GB/s, no ucx (no device)");
}

TEST(Planner, KnowsEveryPathByItsName) {
  for (const std::string_view name : path_names()) EXPECT_EQ(name_of(parse_path(name).value()), name);
  const std::vector<std::string_view> without_gpu = path_names(false);
  EXPECT_EQ(std::count(without_gpu.begin(), without_gpu.end(), "tcp"), 1);
  for (const std::string_view name : {"gpu_ipc", "nccl"})
    EXPECT_EQ(std::count(without_gpu.begin(), without_gpu.end(), name), 0) << name << " needs a GPU";
  const Result<Path> unknown = parse_path("pigeon");
  ASSERT_FALSE(unknown);
  for (const std::string_view name : path_names()) EXPECT_NE(unknown.error().what.find(name), std::string::npos);
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
