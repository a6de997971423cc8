// Tests what the backend for mapped GPU memory does beyond the contract: devices that refuse calls, peers that die, the
// mappings that it opens.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <thread>

#include "tests/transport/process_fixture.h"
#include "transport/base/checksum.h"
#include "transport/gpu_ipc/gpu_ipc_backend.h"
#include "transport/region_descriptor.h"

namespace kvferry {
namespace {

using ::testing::HasSubstr;

constexpr std::uint64_t kIpcBytes = std::uint64_t{4} << 20;

/// A simulated GPU, its memory and a transport for this memory.
struct IpcSide {
  explicit IpcSide(std::uint32_t seed, SimDevice::Drive drive = SimDevice::Drive::kInBackground) : device(seed, drive) {
    options.device = &device;
    memory = {device.allocate(MemoryKind::kDevice, kIpcBytes).value(), kIpcBytes};
    fill(memory, seed);
    transport = make_gpu_ipc_transport(options).value();
    region = transport->register_region({.base = memory.data(), .bytes = kIpcBytes, .device = &device}).value();
  }
  ~IpcSide() {
    transport.reset();
    device.run_all();
    device.release(MemoryKind::kDevice, memory.data());
    EXPECT_EQ(device.num_alive(), 0U) << "streams, events or memory were left behind, or mappings are open";
  }
  PagedTransfer with(const std::string& there, PeerId peer, Direction direction, std::vector<CopyRange> ranges) const {
    return {peer, direction, region, there, std::move(ranges), ""};
  }
  Completion next() {
    const std::vector<Completion> completions = wait_completions(*transport, 1);
    EXPECT_EQ(completions.size(), 1U) << "no completion in time";
    return completions.empty() ? Completion{} : completions[0];
  }
  bool completes_within(std::chrono::milliseconds patience) const {
    return is_readable(transport->event_fd(), patience);
  }

  SimDevice device;
  GpuIpcOptions options;
  std::span<std::byte> memory;
  std::unique_ptr<Transport> transport;
  RegionId region;
};

constexpr auto kByHand = SimDevice::Drive::kByHand;
constexpr auto kQuiet = std::chrono::milliseconds(50);

TEST(GpuIpcTransport, OpensARegionOnceAndClosesItWithItsPeer) {
  IpcSide side(1);
  const auto remote = make_remote_process("gpu_ipc_sim", kIpcBytes);
  const auto other = make_remote_process("gpu_ipc_sim", kIpcBytes);
  const PeerId peer = side.transport->connect(remote->address()).value();
  const PeerId other_peer = side.transport->connect(other->address()).value();
  const std::size_t before = side.device.num_alive();
  for (int round = 0; round < 5; ++round) {
    for (const Direction direction : {Direction::kPull, Direction::kPush}) {
      ASSERT_TRUE(side.transport->submit(side.with(remote->region(), peer, direction, {{0, 0, 5000}})));
      EXPECT_EQ(side.next().code, ErrorCode::kOk);
      EXPECT_EQ(std::memcmp(side.memory.data(), remote->memory().data(), 5000), 0);
      EXPECT_EQ(side.device.num_alive(), before + 1) << "one mapping, and no event";
    }
  }
  ASSERT_TRUE(side.transport->submit(side.with(other->region(), other_peer, Direction::kPull, {{0, 0, 10}})));
  EXPECT_EQ(side.next().code, ErrorCode::kOk);
  EXPECT_EQ(side.device.num_alive(), before + 2);
  const auto expect_open = [&](std::size_t open) {
    const auto deadline = std::chrono::steady_clock::now() + kPatience;
    while (side.device.num_alive() != before + open && std::chrono::steady_clock::now() < deadline)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    EXPECT_EQ(side.device.num_alive(), before + open);
  };
  side.transport->disconnect(peer);
  expect_open(1);
  other->kill();  // the death is noticed without any transfer
  expect_open(0);
}

TEST(GpuIpcTransport, APeerThatDiesInMidCopyIsLostOnceTheDeviceIsThrough) {
  IpcSide side(1, kByHand);
  for (const bool is_fed : {false, true}) {
    const auto remote = make_remote_process("gpu_ipc_sim", kIpcBytes);
    const PeerId peer = side.transport->connect(remote->address()).value();
    PagedTransfer transfer = side.with(remote->region(), peer, Direction::kPull, {{0, 0, 1000}, {5000, 7000, 1000}});
    transfer.is_fed = is_fed;
    const TransferId id = side.transport->submit(transfer).value();
    // the memory, the stream, the mapping and the event of the copies
    while (side.device.num_alive() < 4) std::this_thread::yield();
    remote->kill();
    EXPECT_FALSE(side.completes_within(kQuiet)) << "the device still works with its memory";
    side.device.run_all();
    const Completion completion = side.next();
    EXPECT_EQ(completion.id, id);
    EXPECT_EQ(completion.code, ErrorCode::kPeerLost);
    EXPECT_EQ(std::memcmp(side.memory.data(), remote->memory().data(), 1000), 0) << "the mapping outlives its owner";
  }
}

TEST(GpuIpcTransport, CancelDisconnectAndShutdownWaitForTheDeviceAndNoLonger) {
  const auto remote = make_remote_process("gpu_ipc_sim", kIpcBytes);
  using End = std::function<void(Transport&, TransferId, PeerId)>;
  const std::pair<ErrorCode, End> ends[] = {
      {ErrorCode::kCancelled, [](Transport& transport, TransferId id, PeerId) { transport.cancel(id); }},
      {ErrorCode::kPeerLost, [](Transport& transport, TransferId, PeerId peer) { transport.disconnect(peer); }},
      {ErrorCode::kCancelled, [](Transport& transport, TransferId, PeerId) { transport.shutdown(); }}};
  for (const auto& [code, end] : ends) {
    IpcSide side(1, kByHand);
    side.options.piece_bytes = side.options.in_flight_bytes = 1 << 20;
    side.transport = make_gpu_ipc_transport(side.options).value();
    side.region =
        side.transport->register_region({.base = side.memory.data(), .bytes = kIpcBytes, .device = &side.device})
            .value();
    const PeerId peer = side.transport->connect(remote->address()).value();
    fill(remote->memory(), 5);
    const TransferId id =
        side.transport->submit(side.with(remote->region(), peer, Direction::kPush, {{0, 0, kIpcBytes}})).value();
    while (side.device.num_alive() < 4) std::this_thread::yield();
    std::thread ender([&side, &end, id, peer] { end(*side.transport, id, peer); });
    EXPECT_FALSE(side.completes_within(kQuiet)) << "the device still works with its memory";
    side.device.run_all();
    EXPECT_EQ(side.next().code, code);
    ender.join();
    EXPECT_EQ(std::memcmp(side.memory.data(), remote->memory().data(), 1 << 20), 0);
    EXPECT_NE(side.memory[kIpcBytes - 1], remote->memory()[kIpcBytes - 1]) << "only a piece went";
  }
}

/// Whichever call the device refuses, transfers end with an error, nothing is left behind (see ~IpcSide), and the next
/// transfer works.
TEST(GpuIpcTransport, ARefusalOfTheDeviceEndsTheTransferWithItsReason) {
  const auto remote = make_remote_process("gpu_ipc_sim", kIpcBytes);
  int num_failed = 0;
  for (int refusals = 1; refusals <= 6; ++refusals) {
    for (const bool is_open : {false, true}) {
      IpcSide side(1);
      const PeerId peer = side.transport->connect(remote->address()).value();
      PagedTransfer transfer = side.with(remote->region(), peer, Direction::kPull, {{0, 0, 1000}, {5000, 7000, 1000}});
      transfer.checksums = {1, 2};
      if (is_open) {
        ASSERT_TRUE(side.transport->submit(transfer));
        EXPECT_EQ(side.next().code, ErrorCode::kCorrupt);
      }
      side.device.refuse_next(refusals);
      ASSERT_TRUE(side.transport->submit(transfer));
      const Completion completion = side.next();
      EXPECT_EQ(completion.code, ErrorCode::kInternal);
      EXPECT_THAT(completion.what, HasSubstr("the simulated GPU refuses"));
      num_failed += completion.code == ErrorCode::kInternal ? 1 : 0;
      side.device.refuse_next(0);
      transfer.checksums = {chunk_checksum(remote->memory().subspan(0, 1000)),
                            chunk_checksum(remote->memory().subspan(7000, 1000))};
      ASSERT_TRUE(side.transport->submit(transfer));
      EXPECT_EQ(side.next().code, ErrorCode::kOk);
    }
  }
  EXPECT_EQ(num_failed, 12);
}

/// A device that refuses a copy after it has begun half of it.
class HalfHearted final : public Device {
 public:
  std::string describe() const override { return gpu.describe(); }
  Result<std::byte*> allocate(MemoryKind kind, std::uint64_t bytes) override { return gpu.allocate(kind, bytes); }
  void release(MemoryKind kind, std::byte* base) override { gpu.release(kind, base); }
  Result<void> pin(std::span<std::byte> memory) override { return gpu.pin(memory); }
  void unpin(std::span<std::byte> memory) override { gpu.unpin(memory); }
  Result<DeviceStream> make_stream() override { return gpu.make_stream(); }
  void drop_stream(DeviceStream stream) override { gpu.drop_stream(stream); }
  Result<EventHandle> record(DeviceStream stream) override { return gpu.record(stream); }
  void drop_event(EventHandle event) override { gpu.drop_event(event); }
  Result<bool> is_reached(EventHandle event) override { return gpu.is_reached(event); }
  Result<void> wait(EventHandle event) override { return gpu.wait(event); }
  Result<void> wait_on(DeviceStream stream, EventHandle event) override { return gpu.wait_on(stream, event); }
  Result<void> copy(std::span<const DeviceCopy> copies, DeviceStream stream) override {
    static_cast<void>(gpu.copy(copies.first(copies.size() / 2), stream));
    return Error{ErrorCode::kUnavailable, "half of it is enough"};
  }
  Result<std::string> export_memory(std::span<const std::byte> memory) override { return gpu.export_memory(memory); }
  Result<std::byte*> open_memory(const std::string& exported, std::uint64_t bytes) override {
    return gpu.open_memory(exported, bytes);
  }
  void close_memory(std::byte* base) override { gpu.close_memory(base); }
  Result<std::unique_ptr<Checksums>> checksums(std::span<const std::span<const std::byte>> ranges,
                                               DeviceStream stream) override {
    return gpu.checksums(ranges, stream);
  }
  SimDevice gpu{1};
};

TEST(GpuIpcTransport, ACopyThatWasRefusedHalfwayIsWaitedFor) {
  HalfHearted device;
  std::vector<std::byte> memory(kIpcBytes);
  const auto remote = make_remote_process("gpu_ipc_sim", kIpcBytes);
  fill(remote->memory(), 5);
  GpuIpcOptions options;
  options.device = &device;
  const auto transport = make_gpu_ipc_transport(options).value();
  const RegionId region =
      transport->register_region({.base = memory.data(), .bytes = kIpcBytes, .device = &device}).value();
  const PeerId peer = transport->connect(remote->address()).value();
  ASSERT_TRUE(transport->submit(
      {peer, Direction::kPull, region, remote->region(), {{0, 0, 1000}, {5000, 5000, 1000}}, "never"}));
  EXPECT_FALSE(is_readable(transport->event_fd(), 4 * kQuiet)) << "the first half is still to come";
  device.gpu.run_all();
  const std::vector<Completion> completions = wait_completions(*transport, 1);
  ASSERT_EQ(completions.size(), 1U);
  EXPECT_EQ(completions[0].code, ErrorCode::kInternal);
  EXPECT_EQ(completions[0].what, "half of it is enough");
  EXPECT_EQ(std::memcmp(memory.data(), remote->memory().data(), 1000), 0);
}

TEST(GpuIpcTransport, ADeviceThatIsDeadHoldsNobodyUp) {
  IpcSide side(1, kByHand);
  const auto remote = make_remote_process("gpu_ipc_sim", kIpcBytes);
  const PeerId peer = side.transport->connect(remote->address()).value();
  ASSERT_TRUE(side.transport->submit(side.with(remote->region(), peer, Direction::kPull, {{0, 0, 1000}})));
  while (side.device.num_alive() < 4) std::this_thread::yield();
  side.device.refuse_next(1 << 30);
  const Completion completion = side.next();
  EXPECT_EQ(completion.code, ErrorCode::kInternal);
  EXPECT_THAT(completion.what, HasSubstr("the simulated GPU refuses"));
  side.device.refuse_next(0);
  side.transport->disconnect(peer);
  std::this_thread::sleep_for(kQuiet);
  side.device.run_all();  // the device still works, and the memory from which it copies is still mapped
}

TEST(GpuIpcTransport, OnlyMemoryOfItsDeviceIsTaken) {
  IpcSide side(1);
  SimDevice other(2);
  std::vector<std::byte> host(100);
  const auto refused = side.transport->register_region(host.data(), host.size());
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kUnavailable);
  EXPECT_THAT(refused.error().what, HasSubstr("can't reach host memory"));
  const auto code_for = [&](Device& device) {
    return side.transport->register_region({.base = host.data(), .bytes = host.size(), .device = &device}).error().code;
  };
  EXPECT_EQ(code_for(other), ErrorCode::kUnavailable);
  side.device.refuse_next(1);
  EXPECT_EQ(code_for(side.device), ErrorCode::kUnavailable);
  side.device.refuse_next(1);
  EXPECT_EQ(make_gpu_ipc_transport(side.options).error().code, ErrorCode::kUnavailable) << "no stream";
}

TEST(GpuIpcTransport, MemoryThatCanNotBeOpenedIsAnErrorOfItsTransfers) {
  IpcSide side(1);
  const auto remote = make_remote_process("gpu_ipc_sim", kIpcBytes);
  const PeerId peer = side.transport->connect(remote->address()).value();
  RegionDescriptor descriptor = decode<RegionDescriptor>(remote->region(), "descriptor").value();
  descriptor.rkey = "garbage";
  ASSERT_TRUE(side.transport->submit(side.with(encode(descriptor), peer, Direction::kPull, {{0, 0, 100}})));
  EXPECT_EQ(side.next().code, ErrorCode::kInternal);
  ASSERT_TRUE(side.transport->submit(side.with(remote->region(), peer, Direction::kPull, {{0, 0, 100}})));
  EXPECT_EQ(side.next().code, ErrorCode::kOk);
}

TEST(GpuIpcTransport, MemoryOfADyingPeerIsNotAnErrorOfTheGpu) {
  IpcSide side(1);
  const auto remote = make_remote_process("gpu_ipc_sim", kIpcBytes);
  const PeerId peer = side.transport->connect(remote->address()).value();
  RegionDescriptor descriptor = decode<RegionDescriptor>(remote->region(), "descriptor").value();
  descriptor.rkey = "/proc/1/fd/no-such-memory";  // as if the kernel had taken the memory away, but not the sockets yet
  ASSERT_TRUE(side.transport->submit(side.with(encode(descriptor), peer, Direction::kPull, {{0, 0, 100}})));
  EXPECT_FALSE(side.completes_within(kQuiet)) << "the peer may be about to end";
  remote->kill();
  EXPECT_EQ(side.next().code, ErrorCode::kPeerLost);
}

TEST(GpuIpcTransport, TellsWhatStandsBetweenTwoProcessesOfAHost) {
  const auto remote = make_remote_process("gpu_ipc_sim", kIpcBytes);
  const gpu_ipc::Address there = decode<gpu_ipc::Address>(remote->address(), "address").value();
  EXPECT_THAT(there.where.pid_namespace, HasSubstr("pid:["));
  const auto what_for = [&](auto change) {
    IpcSide side(1);
    gpu_ipc::Address address = there;
    change(address.where);
    const PeerId peer = side.transport->connect(encode(address)).value();
    side.device.refuse_next(1);
    EXPECT_TRUE(side.transport->submit(side.with(remote->region(), peer, Direction::kPull, {{0, 0, 100}})));
    return side.next().what;
  };
  EXPECT_EQ(what_for([](gpu_ipc::Whereabouts&) {}), "cannot open the peer's memory: the simulated GPU refuses");
  EXPECT_EQ(what_for([](gpu_ipc::Whereabouts& where) { where = {}; }),
            "cannot open the peer's memory: the simulated GPU refuses")
      << "an earlier version tells nothing";
  EXPECT_THAT(what_for([](gpu_ipc::Whereabouts& where) { where.pid_namespace = "pid:[1]"; }),
              HasSubstr("refuses (the peer's container has another PID namespace: start both with"));
  EXPECT_THAT(what_for([](gpu_ipc::Whereabouts& where) { where.pid_namespace = where.ipc_namespace = "x"; }),
              HasSubstr("another PID and IPC namespace"));
}

TEST(GpuIpcTransport, TellsApartGpusAndTheirParts) {
  const auto reason = [](const char* own, const char* peer) {
    return gpu_ipc::likely_reason({own, "", ""}, {peer, "", ""});
  };
  EXPECT_EQ(reason("GPU-1", "GPU-1"), "");
  EXPECT_EQ(reason("", "GPU-1"), "") << "a device without a UUID";
  EXPECT_EQ(reason("GPU-1", "GPU-2"), " (this process has GPU-1, the peer has GPU-2)");
  EXPECT_THAT(reason("MIG-1", "MIG-2"), HasSubstr("has MIG-2; CUDA IPC maps no memory between MIG instances"));
  EXPECT_THAT(reason("GPU-1", "MIG-2"), HasSubstr("CUDA IPC maps no memory between MIG instances"));
}

TEST(GpuIpcTransport, BadOptionsAreNamed) {
  SimDevice device(1);
  const auto what_for = [&](auto change) {
    GpuIpcOptions options;
    options.device = &device;
    change(options);
    const auto made = make_gpu_ipc_transport(options);
    return made ? "" : made.error().what;
  };
  EXPECT_EQ(what_for([](GpuIpcOptions&) {}), "");
  EXPECT_THAT(what_for([](GpuIpcOptions& one) { one.device = nullptr; }), HasSubstr("device"));
  EXPECT_THAT(what_for([](GpuIpcOptions& one) { one.piece_bytes = 0; }), HasSubstr("piece_bytes"));
  EXPECT_THAT(what_for([](GpuIpcOptions& one) { one.silence_ns = 0; }), HasSubstr("silence_ns"));
}

}  // namespace
}  // namespace kvferry
