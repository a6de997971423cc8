// Tests what only the UCX backend has: its own messages, its cost when idle, its checks of who answers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <thread>

#include "tests/device/sim_device.h"
#include "tests/transport/process_fixture.h"
#include "tests/transport/ucx_over_tcp.h"
#include "transport/make_transport.h"
#include "transport/region_descriptor.h"
#include "transport/ucx/messages.h"

namespace kvferry {
namespace {

using ::testing::HasSubstr;

class UcxTransport : public ::testing::Test {
 protected:
  UcxTransport() { let_ucx_use_tcp(); }
};

TEST_F(UcxTransport, DescribesLibraryAndPathOnceItIsConnected) {
  UcxFixture fixture;
  const auto transport = fixture.make_transport(16);
  EXPECT_THAT(transport->describe(), HasSubstr("at the first connection"));
  const auto remote = fixture.make_remote(4096);
  std::vector<std::byte> memory(4096);
  const RegionId region = transport->register_region(memory.data(), memory.size()).value();
  const PeerId peer = transport->connect(remote->address()).value();
  ASSERT_TRUE(transport->submit({peer, Direction::kPull, region, remote->region(), {{0, 0, 4096}}, ""}));
  const std::vector<Completion> completions = wait_completions(*transport, 1);
  ASSERT_EQ(completions.size(), 1U);
  EXPECT_EQ(completions[0].path, "ucx/tcp") << "no other transport of UCX is here";
  EXPECT_THAT(transport->describe(), HasSubstr("over tcp/"));
}

TEST_F(UcxTransport, OptionsThatMakeNoSenseAreRefused) {
  UcxOptions options;
  options.operations_per_peer_max = 0;
  const auto made = make_ucx_transport(options);
  ASSERT_FALSE(made);
  EXPECT_EQ(made.error().code, ErrorCode::kInvalidArgument);
}

TEST_F(UcxTransport, ItsThreadIsTheGpusBeforeUcxStarts) {
  SimDevice device(1);
  UcxOptions options;
  options.device = &device;
  const auto transport = make_ucx_transport(options);
  ASSERT_TRUE(transport) << transport.error().what;
  EXPECT_EQ(device.history(), std::vector<std::string>{"bind_thread"});
  EXPECT_FALSE(device.bound_threads().contains(std::this_thread::get_id()));
}

TEST_F(UcxTransport, GpuMemoryIsNotSentToAGrantedRegion) {
  SimDevice device(1);
  const auto transport = make_ucx_transport({}).value();
  const auto owner = make_ucx_transport({}).value();
  std::vector<std::byte> memory(4096), pool(4096);
  const MemoryRegion on_gpu{.base = memory.data(), .bytes = memory.size(), .device = &device};
  const RegionId region = transport->register_region(on_gpu).value();
  const RegionId granted = owner->register_region(pool.data(), pool.size()).value();
  const std::string grant = owner->export_grant(owner->grant(granted, 0, pool.size()).value()).value();
  const PeerId peer = transport->connect(owner->address()).value();
  for (const Direction direction : {Direction::kPull, Direction::kPush}) {
    ASSERT_TRUE(transport->submit({peer, direction, region, grant, {{0, 0, 4096}}, ""}));
    const std::vector<Completion> completions = wait_completions(*transport, 1);
    ASSERT_EQ(completions.size(), 1U);
    EXPECT_EQ(completions[0].code, ErrorCode::kRefused);
    EXPECT_THAT(completions[0].what, HasSubstr("can't carry this node's GPU memory"));
  }
}

TEST_F(UcxTransport, AnUnknownPeerAtThePeersAddressIsNotTouched) {
  UcxFixture fixture;
  const auto transport = fixture.make_transport(16);
  const auto remote = fixture.make_remote(4096);
  std::vector<std::byte> memory(4096);
  const RegionId region = transport->register_region(memory.data(), memory.size()).value();
  // As if the process that we know had ended, and this process had got its port.
  ucx::Address address = decode<ucx::Address>(remote->address(), "address").value();
  RegionDescriptor descriptor = decode<RegionDescriptor>(remote->region(), "region").value();
  descriptor.incarnation = ++address.incarnation;
  const PeerId peer = transport->connect(encode(address)).value();
  ASSERT_TRUE(transport->submit({peer, Direction::kPush, region, encode(descriptor), {{0, 0, 4096}}, "x"}));
  const std::vector<Completion> completions = wait_completions(*transport, 1);
  ASSERT_EQ(completions.size(), 1U);
  EXPECT_EQ(completions[0].code, ErrorCode::kPeerLost);
  EXPECT_THAT(completions[0].what, HasSubstr("another process"));
}

TEST_F(UcxTransport, ServesNobodyWhoWasNotToldItsSecret) {
  UcxOptions options;
  options.silence_ns = 300 * kMillisecond;
  const auto unknown_peer = make_ucx_transport(options).value();
  const auto owner = make_ucx_transport(options).value();
  std::vector<std::byte> memory(4096);
  std::vector<std::byte> pool(4096);
  const RegionId region = unknown_peer->register_region(memory.data(), memory.size()).value();
  const std::string remote = owner->export_region(owner->register_region(pool.data(), pool.size()).value()).value();
  ucx::Address address = decode<ucx::Address>(owner->address(), "address").value();
  address.secret[3] ^= 1;
  const PeerId peer = unknown_peer->connect(encode(address)).value();
  ASSERT_TRUE(unknown_peer->submit({peer, Direction::kPush, region, remote, {{0, 0, 4096}}, "written"}));
  const std::vector<Completion> completions = wait_completions(*unknown_peer, 1);
  ASSERT_EQ(completions.size(), 1U);
  EXPECT_EQ(completions[0].code, ErrorCode::kPeerLost);
  EXPECT_TRUE(owner->poll_notifications().empty());
}

TEST_F(UcxTransport, OutlivesBrokenAddressesAndKeys) {
  UcxOptions options;
  options.silence_ns = 100 * kMillisecond;
  const auto transport = make_ucx_transport(options).value();
  const auto owner = make_ucx_transport(options).value();
  std::vector<std::byte> memory(4096);
  const RegionId region = transport->register_region(memory.data(), memory.size()).value();
  const std::string remote = owner->export_region(owner->register_region(memory.data(), 4096).value()).value();
  const ucx::Address address = decode<ucx::Address>(owner->address(), "address").value();
  const auto ends = [&](const std::string& to, const std::string& what) {
    const PeerId peer = transport->connect(to).value();
    ASSERT_TRUE(transport->submit({peer, Direction::kPull, region, what, {{0, 0, 4096}}, ""}));
    EXPECT_EQ(wait_completions(*transport, 1).size(), 1U);
    transport->disconnect(peer);
  };
  ucx::Address broken = address;
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{8}, address.worker_address.size() / 2}) {
    broken.worker_address = address.worker_address.substr(0, bytes);
    ends(encode(broken), remote);
  }
  RegionDescriptor descriptor = decode<RegionDescriptor>(remote, "region").value();
  const std::string rkey = descriptor.rkey;
  for (std::size_t bytes = 0; bytes < rkey.size(); bytes += 3) {
    descriptor.rkey = rkey.substr(0, bytes);
    ends(owner->address(), encode(descriptor));
  }
  broken.worker_address.clear();
  EXPECT_EQ(transport->connect(encode(broken)).error().code, ErrorCode::kInvalidArgument);
  ends(owner->address(), remote);
}

TEST_F(UcxTransport, KeepsUcxsMessagesOffStdout) {
  UcxFixture fixture;
  ::testing::internal::CaptureStdout();
  {
    const auto transport = fixture.make_transport(16);
    const auto remote = fixture.make_remote(4096);
    std::vector<std::byte> memory(4096);
    const RegionId region = transport->register_region(memory.data(), memory.size()).value();
    const PeerId peer = transport->connect(remote->address()).value();
    remote->kill();  // UCX prints a message about a refused connection
    ASSERT_TRUE(transport->submit({peer, Direction::kPull, region, remote->region(), {{0, 0, 4096}}, ""}));
    EXPECT_EQ(wait_completions(*transport, 1).size(), 1U);
  }
  EXPECT_EQ(::testing::internal::GetCapturedStdout(), "");
}

TEST_F(UcxTransport, AStuckPeerTakesItsOtherTransfersDownButTheyAreToldWhy) {
  UcxFixture fixture;
  const auto transport = fixture.make_transport(16);
  const auto remote = fixture.make_remote(4096);
  std::vector<std::byte> memory(4096);
  const RegionId region = transport->register_region(memory.data(), memory.size()).value();
  const PeerId peer = transport->connect(remote->address()).value();
  const PagedTransfer pull{peer, Direction::kPull, region, remote->region(), {{0, 0, 4096}}, ""};
  ASSERT_TRUE(transport->submit(pull));
  ASSERT_EQ(wait_completions(*transport, 1).size(), 1U);
  remote->stop();
  const TransferId cancelled = transport->submit(pull).value();
  const TransferId other = transport->submit(pull).value();
  wait_until_posted(*transport);
  transport->cancel(cancelled);
  const std::vector<Completion> completions = wait_completions(*transport, 2);
  ASSERT_EQ(completions.size(), 2U);
  for (const Completion& completion : completions) {
    EXPECT_EQ(completion.code, completion.id == other ? ErrorCode::kPeerLost : ErrorCode::kCancelled);
    EXPECT_THAT(completion.what, HasSubstr(completion.id == other ? "made no progress" : "cancelled"));
  }
}

}  // namespace
}  // namespace kvferry
