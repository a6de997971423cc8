// Tests what the NCCL backend does beyond the contract: hung communicators, devices that refuse calls, peers that break
// the rules.
//
// The two transports are in one process, each with its own simulated GPU.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <optional>

#include "tests/transport/sim_communicators.h"
#include "tests/transport/transport_fixture.h"
#include "transport/base/checksum.h"
#include "transport/nccl/channel.h"
#include "transport/nccl/communicators.h"
#include "transport/nccl/control_plane.h"

namespace kvferry {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr std::uint64_t kNcclBytes = std::uint64_t{20} << 20;

/// A simulated GPU, its memory and a transport for this memory.
struct NcclSide {
  explicit NcclSide(std::uint32_t seed, TimeNs hung_ns = 30 * kSecond) : device(seed, SimDevice::Drive::kInBackground) {
    options.device = &device;
    options.hung_ns = hung_ns;
    options.stuck_ns = 100 * kMillisecond;
    options.silence_ns = 500 * kMillisecond;
    sim.seed = seed;
    memory = {device.allocate(MemoryKind::kDevice, kNcclBytes).value(), kNcclBytes};
    fill(memory, seed);
    transport = nccl::make_transport_over(make_sim_communicators(device, sim), options).value();
    region =
        transport->register_region(MemoryRegion{.base = memory.data(), .bytes = kNcclBytes, .device = &device}).value();
    exported = transport->export_region(region).value();
  }
  ~NcclSide() {
    transport.reset();
    device.release(MemoryKind::kDevice, memory.data());
    EXPECT_EQ(device.num_alive(), 0U) << "streams, events or memory were left behind";
    EXPECT_EQ(*sim.num_alive, 0) << "communicators were left behind";
  }
  PagedTransfer with(const NcclSide& other, PeerId peer, Direction direction, std::vector<CopyRange> ranges) const {
    return {peer, direction, region, other.exported, std::move(ranges), ""};
  }
  ErrorCode run(PagedTransfer transfer) {
    const TransferId id = transport->submit(std::move(transfer)).value();
    const std::vector<Completion> completions = wait_completions(*transport, 1);
    EXPECT_EQ(completions.size(), 1U) << "no completion in time";
    if (completions.empty()) return ErrorCode::kTimeout;
    EXPECT_EQ(completions[0].id, id);
    return completions[0].code;
  }

  SimDevice device;
  NcclOptions options;
  SimNccl sim;
  std::span<std::byte> memory;
  std::unique_ptr<Transport> transport;
  RegionId region;
  std::string exported;
};

std::vector<CopyRange> mixed_ranges() {
  return {{0, 0, 100}, {200, 4000, 3000}, {10'000, 20'000, 9 << 20}, {5000, 190, 7}};
}

TEST(NcclTransport, MovesDeviceMemoryBothWays) {
  NcclSide a(1), b(2);
  const PeerId peer = a.transport->connect(b.transport->address()).value();
  for (const Direction direction : {Direction::kPull, Direction::kPush}) {
    PagedTransfer transfer = a.with(b, peer, direction, mixed_ranges());
    const bool is_pull = direction == Direction::kPull;
    for (const CopyRange& range : transfer.ranges) {
      const std::span<std::byte> source = is_pull ? b.memory : a.memory;
      transfer.checksums.push_back(
          chunk_checksum(source.subspan(is_pull ? range.remote_offset : range.local_offset, range.bytes)));
    }
    EXPECT_EQ(a.run(transfer), ErrorCode::kOk);
    for (const CopyRange& range : transfer.ranges)
      EXPECT_EQ(std::memcmp(a.memory.data() + range.local_offset, b.memory.data() + range.remote_offset, range.bytes),
                0);
    fill(a.memory, 3);
  }
}

TEST(NcclTransport, ReachesItsOwnDeviceAndHostMemoryThatItPins) {
  NcclSide a(1);
  SimDevice other(9);
  std::vector<std::byte> host(1000);
  EXPECT_EQ(
      a.transport->register_region(MemoryRegion{.base = host.data(), .bytes = 1000, .device = &other}).error().code,
      ErrorCode::kUnavailable);
  const std::size_t before = a.device.num_alive();
  const RegionId region = a.transport->register_region(host.data(), host.size()).value();
  EXPECT_EQ(a.device.num_alive(), before + 1) << "it is pinned";
  EXPECT_TRUE(a.transport->unregister_region(region));
  EXPECT_EQ(a.device.num_alive(), before);
  a.device.refuse_next(1);
  EXPECT_EQ(a.transport->register_region(host.data(), host.size()).error().code, ErrorCode::kUnavailable);
  EXPECT_TRUE(a.transport->register_region(host.data(), host.size())) << "and left pinned: the end unpins it";
}

TEST(NcclTransport, OppositeTransfersDoNotWaitForEachOther) {
  NcclSide a(1), b(2);
  const PeerId to_b = a.transport->connect(b.transport->address()).value();
  const PeerId to_a = b.transport->connect(a.transport->address()).value();
  constexpr std::uint64_t kHalfBytes = kNcclBytes / 2;
  constexpr std::size_t kRounds = 4;
  for (std::size_t round = 0; round < kRounds; ++round) {
    for (const Direction direction : {Direction::kPush, Direction::kPull}) {
      ASSERT_TRUE(a.transport->submit(a.with(b, to_b, direction, {{0, 0, kHalfBytes}})));
      ASSERT_TRUE(b.transport->submit(b.with(a, to_a, direction, {{kHalfBytes, kHalfBytes, kHalfBytes}})));
    }
  }
  for (NcclSide* const side : {&a, &b}) {
    const std::vector<Completion> completions = wait_completions(*side->transport, 2 * kRounds);
    ASSERT_EQ(completions.size(), 2 * kRounds);
    for (const Completion& completion : completions) EXPECT_EQ(completion.code, ErrorCode::kOk) << completion.what;
  }
}

TEST(NcclTransport, AHungCommunicatorIsAbortedAndTheNextConnectWorks) {
  for (const Direction direction : {Direction::kPull, Direction::kPush}) {
    NcclSide a(1, 2 * kSecond), b(2);  // long, because a busy machine may take a while too
    const std::vector<CopyRange> ranges = {{0, 0, 100}, {200, 200, 100}};
    const PeerId peer = a.transport->connect(b.transport->address()).value();
    EXPECT_EQ(a.run(a.with(b, peer, direction, ranges)), ErrorCode::kOk);
    *a.sim.is_hung = *b.sim.is_hung = true;
    EXPECT_EQ(a.run(a.with(b, peer, direction, ranges)), ErrorCode::kPeerLost);
    EXPECT_EQ(*a.sim.num_alive, 0) << "memory was told to be quiet before the abort";
    *a.sim.is_hung = *b.sim.is_hung = false;
    const PeerId next = a.transport->connect(b.transport->address()).value();
    EXPECT_NE(next, peer);
    EXPECT_EQ(a.run(a.with(b, next, direction, ranges)), ErrorCode::kOk);
  }
}

TEST(NcclTransport, CancelDoesNotWaitForAHungCommunicator) {
  NcclSide a(1), b(2);
  const PeerId peer = a.transport->connect(b.transport->address()).value();
  EXPECT_EQ(a.run(a.with(b, peer, Direction::kPush, {{0, 0, 100}})), ErrorCode::kOk);
  *a.sim.is_hung = true;
  const TransferId id = a.transport->submit(a.with(b, peer, Direction::kPush, {{0, 0, 1000}})).value();
  const TransferId other = a.transport->submit(a.with(b, peer, Direction::kPush, {{0, 0, 1000}})).value();
  // the transfer is in the stream by now; if it is not, the cancellation ends it all the same
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  a.transport->cancel(id);
  const std::vector<Completion> completions = wait_completions(*a.transport, 2);
  ASSERT_EQ(completions.size(), 2U);
  for (const Completion& completion : completions)
    EXPECT_EQ(completion.code, completion.id == other ? ErrorCode::kPeerLost : ErrorCode::kCancelled);
}

TEST(NcclTransport, AFailedCommunicatorEndsItsTransfers) {
  NcclSide a(1), b(2);
  a.sim.death = SimNccl::Death::kFails;
  a.transport = nccl::make_transport_over(make_sim_communicators(a.device, a.sim), a.options).value();
  a.region =
      a.transport->register_region(MemoryRegion{.base = a.memory.data(), .bytes = kNcclBytes, .device = &a.device})
          .value();
  const PeerId peer = a.transport->connect(b.transport->address()).value();
  EXPECT_EQ(a.run(a.with(b, peer, Direction::kPull, {{0, 0, 100}})), ErrorCode::kOk);
  *b.sim.is_hung = true;
  const TransferId id = a.transport->submit(a.with(b, peer, Direction::kPull, {{0, 0, 1000}})).value();
  b.transport->shutdown();
  const std::vector<Completion> completions = wait_completions(*a.transport, 1);
  ASSERT_EQ(completions.size(), 1U);
  EXPECT_EQ(completions[0].id, id);
  EXPECT_EQ(completions[0].code, ErrorCode::kPeerLost);
}

/// Whichever call a device refuses, transfers end, nothing is left behind (see ~NcclSide), and the next connection
/// works.
TEST(NcclTransport, ADeviceThatRefusesEndsTransfersWithAnError) {
  int num_failed = 0;
  for (int skipped = 0; skipped < 12; ++skipped) {
    NcclSide a(static_cast<std::uint32_t>(skipped)), b(100);
    NcclSide& refusing = skipped % 2 == 0 ? a : b;
    PeerId peer = a.transport->connect(b.transport->address()).value();
    for (int round = 0; round < 6; ++round) {
      const Direction direction = round % 2 == 0 ? Direction::kPull : Direction::kPush;
      PagedTransfer transfer = a.with(b, peer, direction, mixed_ranges());
      transfer.checksums = {1, 2, 3, 4};  // these checksums are wrong, but are accepted at first
      if (round < 4) {
        ASSERT_TRUE(a.transport->submit(transfer));
        std::this_thread::sleep_for(std::chrono::microseconds(skipped * 300));
        refusing.device.refuse_next(1 + skipped % 3);
      }
      const std::vector<Completion> completions =
          round < 4 ? wait_completions(*a.transport, 1) : std::vector<Completion>{};
      if (round < 4) {
        ASSERT_EQ(completions.size(), 1U);
        EXPECT_NE(completions[0].code, ErrorCode::kOk);
        num_failed += completions[0].code != ErrorCode::kCorrupt ? 1 : 0;
        refusing.device.refuse_next(0);
        peer = a.transport->connect(b.transport->address()).value();
        continue;
      }
      transfer.checksums = {};
      ErrorCode code = a.run(transfer);
      if (code == ErrorCode::kPeerLost) {  // the other side has ended the session, and this side learns of it only now
        transfer.peer = a.transport->connect(b.transport->address()).value();
        code = a.run(transfer);
      }
      EXPECT_EQ(code, ErrorCode::kOk);
    }
  }
  EXPECT_GT(num_failed, 5) << "the refusals came too late to matter";
}

/// A communicator that does nothing and is aborted at once.
class IdleCommunicator final : public nccl::Communicator {
 public:
  State state() override { return is_aborted_ ? State::kAborted : State::kReady; }
  std::string why() const override { return ""; }
  Result<void> send(std::span<const std::span<std::byte>>, DeviceStream) override { return {}; }
  Result<void> receive(std::span<const std::span<std::byte>>, DeviceStream) override { return {}; }
  void abort() override { is_aborted_ = true; }

 private:
  bool is_aborted_ = false;
};
struct IdleCommunicators final : nccl::Communicators {
  std::string describe() const override { return ""; }
  Result<std::string> make_id() override { return std::string(); }
  Result<std::unique_ptr<nccl::Communicator>> begin(const std::string&, int) override {
    return std::unique_ptr<nccl::Communicator>(std::make_unique<IdleCommunicator>());
  }
};

TEST(NcclChannel, IsQuietOnceItsStreamEndsOrTheDeviceFailsForASecond) {
  for (const bool device_dies : {false, true}) {
    SimDevice device(1);
    nccl::StagingPool staging(device);
    staging.give_back(device.allocate(MemoryKind::kDevice, nccl::kPieceBytesMax).value());
    IdleCommunicators communicators;
    const auto channel = nccl::Channel::open(device, staging, communicators, "", 0, nccl::Role::kSender).value();
    std::vector<nccl::Channel::Report> reports;
    const auto is_quiet_at = [&](TimeNs now) {
      channel->advance(now, reports);
      return channel->is_quiet();
    };
    EXPECT_FALSE(is_quiet_at(kSecond));
    device.enqueue(channel->stream(), [] { return true; });
    channel->abort();
    EXPECT_FALSE(is_quiet_at(2 * kSecond));
    EXPECT_FALSE(is_quiet_at(10 * kSecond)) << "the stream still works";
    device.refuse_next(1);
    EXPECT_FALSE(is_quiet_at(11 * kSecond)) << "one failure of the device does not mean that it is dead";
    EXPECT_FALSE(is_quiet_at(12 * kSecond));
    device.refuse_next(device_dies ? 3 : 0);
    if (!device_dies) device.run_all();
    EXPECT_EQ(is_quiet_at(13 * kSecond), !device_dies);
    EXPECT_EQ(is_quiet_at(14 * kSecond - 1), !device_dies);
    EXPECT_TRUE(is_quiet_at(14 * kSecond));
    device.run_all();
  }
}

/// Sends messages on the control link, but is no transport.
class UnknownPeer {
 public:
  explicit UnknownPeer(const Transport& victim)
      : address_(decode<nccl::Address>(victim.address(), "address").value()),
        plane_(nccl::ControlPlane::open({}).value()),
        peer_(plane_->reach(address_.control, 0)) {}
  template <class Body>
  void say(nccl::Kind kind, const Body& body) {
    plane_->send(*peer_, nccl::pack_message(session_, kind, encode(body)));
  }
  void greet() { say(nccl::Kind::kHello, nccl::Hello{nccl::kProtocolVersion, plane_->address()}); }
  void ping() { say(nccl::Kind::kPing, plane_->address()); }
  /// Returns the next message of the victim; nullopt if none comes in time.
  std::optional<nccl::Kind> hear() {
    const auto deadline = std::chrono::steady_clock::now() + kPatience;
    while (std::chrono::steady_clock::now() < deadline) {
      for (const auto& incoming : plane_->advance(SteadyClock().now())) {
        const auto message = nccl::read_message(incoming.message);
        if (message && message->kind != nccl::Kind::kPing) return message->kind;
      }
      is_readable(plane_->event_fd(), std::chrono::milliseconds(20));
    }
    return std::nullopt;
  }
  nccl::Ask ask(std::vector<std::uint64_t> extents, nccl::Purpose purpose = nccl::Purpose::kPull) const {
    return {1, static_cast<std::uint8_t>(purpose), 1, 0, 100, std::move(extents)};
  }
  nccl::ControlAddress control() const { return plane_->address(); }

 private:
  static inline std::uint64_t num_made_ = 0;
  const std::uint64_t session_ = ++num_made_;
  const nccl::Address address_;
  const std::unique_ptr<nccl::ControlPlane> plane_;
  const nccl::ControlPeerPtr peer_;
};

TEST(NcclTransport, WhoBreaksTheRulesIsSentAway) {
  NcclSide a(1), b(2);
  const auto expect_bye = [&](const char* what, const std::function<void(UnknownPeer&)>& act) {
    UnknownPeer unknown_peer(*a.transport);
    act(unknown_peer);
    EXPECT_EQ(unknown_peer.hear(), nccl::Kind::kBye) << what;
  };
  const nccl::Open open{true, "kvferry-sim-nccl-none"};
  expect_bye("a session that is not known", [](UnknownPeer& one) { one.ping(); });
  expect_bye("another protocol", [](UnknownPeer& one) {
    one.say(nccl::Kind::kHello, nccl::Hello{nccl::kProtocolVersion + 1, one.control()});
  });
  expect_bye("no channel", [](UnknownPeer& one) {
    one.greet();
    one.say(nccl::Kind::kAsk, one.ask({0, 8}));
  });
  expect_bye("a channel twice", [&](UnknownPeer& one) {
    one.greet();
    one.say(nccl::Kind::kOpen, open);
    one.say(nccl::Kind::kOpen, open);
  });
  for (const std::vector<std::uint64_t>& extents : std::vector<std::vector<std::uint64_t>>{
           {}, {0}, {0, 0}, {~std::uint64_t{0}, 2}, {0, nccl::kPieceBytesMax, 0, 1}, {0, nccl::kPieceBytesMax + 1}}) {
    expect_bye("bad extents", [&](UnknownPeer& one) {
      one.greet();
      one.say(nccl::Kind::kOpen, open);
      one.say(nccl::Kind::kAsk, one.ask(extents));
    });
  }
  expect_bye("too much at once", [&](UnknownPeer& one) {
    one.greet();
    one.say(nccl::Kind::kOpen, open);
    for (std::uint64_t token = 0; token <= nccl::kServedMax; ++token) {
      nccl::Ask ask = one.ask({0, 8});
      ask.token = token;
      one.say(nccl::Kind::kAsk, ask);
    }
  });
  expect_bye("what targets say", [](UnknownPeer& one) {
    one.greet();
    one.say(nccl::Kind::kData, nccl::Data{1});
  });
  expect_bye("garbage", [](UnknownPeer& one) {
    one.greet();
    one.say(nccl::Kind::kAsk, std::string("garbage"));
  });
  UnknownPeer polite(*a.transport);
  polite.greet();
  polite.say(nccl::Kind::kOpen, open);
  polite.say(nccl::Kind::kAsk, polite.ask({kNcclBytes, 8}));
  EXPECT_EQ(polite.hear(), nccl::Kind::kAnswer) << "beyond the region's end is a refusal";
  const PeerId peer = b.transport->connect(a.transport->address()).value();
  EXPECT_EQ(b.run(b.with(a, peer, Direction::kPull, mixed_ranges())), ErrorCode::kOk);
}

TEST(NcclControlPlane, AMessageWhoseRestNeverComesExpires) {
  const auto plane = nccl::ControlPlane::open({}).value();
  const auto sender = make_tcp_transport({}).value();
  std::array<std::byte, 64> memory{};
  PagedTransfer part{sender->connect(plane->address().address).value(),
                     Direction::kPush,
                     sender->register_region(memory.data(), memory.size()).value(),
                     plane->address().region,
                     {},
                     ""};
  const auto send = [&](char has_more, const std::string& bytes) {
    part.notification = std::string("stream-1") + has_more + bytes;
    sender->submit(part).value();
    while (!sender->wait(kSecond)) continue;
    EXPECT_EQ(sender->poll().at(0).code, ErrorCode::kOk);
  };
  for (const TimeNs pause : {kSecond, 61 * kSecond}) {
    send(1, "first ");
    TimeNs now = kSecond;
    EXPECT_TRUE(plane->advance(now).empty());
    EXPECT_TRUE(plane->advance(now += pause).empty());
    send(0, "rest");
    const auto incoming = plane->advance(now);
    ASSERT_EQ(incoming.size(), 1u);
    EXPECT_EQ(incoming[0].message, pause == kSecond ? "first rest" : "rest");
  }
}

TEST(NcclControlPlane, NothingOfAMessageThatIsTooLongIsTakenForAnother) {
  const auto here = nccl::ControlPlane::open({}).value(), there = nccl::ControlPlane::open({}).value();
  const nccl::ControlPeerPtr peer = here->reach(there->address(), 0);
  here->send(*peer, std::string(3 << 20, 'x'));
  here->send(*peer, "the next one");
  std::vector<nccl::ControlPlane::Incoming> arrived;
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (arrived.empty() && std::chrono::steady_clock::now() < deadline) {
    here->advance(kSecond);
    for (auto& incoming : there->advance(kSecond)) arrived.push_back(std::move(incoming));
    is_readable(there->event_fd(), std::chrono::milliseconds(1));
  }
  ASSERT_EQ(arrived.size(), 1u);
  EXPECT_EQ(arrived[0].message, "the next one");
}

TEST(NcclTransport, BadOptionsAreNamed) {
  SimDevice device(1);
  const auto what_for = [&](auto change) {
    NcclOptions options;
    options.device = &device;
    change(options);
    const auto made = nccl::make_transport_over(make_sim_communicators(device), options);
    return made ? "" : made.error().what;
  };
  EXPECT_EQ(what_for([](NcclOptions&) {}), "");
  EXPECT_THAT(what_for([](NcclOptions& one) { one.device = nullptr; }), HasSubstr("device"));
  EXPECT_THAT(what_for([](NcclOptions& one) { one.piece_bytes = nccl::kPieceBytesMax + 1; }), HasSubstr("piece_bytes"));
  EXPECT_THAT(what_for([](NcclOptions& one) { one.pieces_per_peer_max = 0; }), HasSubstr("pieces_per_peer_max"));
  EXPECT_THAT(what_for([](NcclOptions& one) { one.hung_ns = 0; }), HasSubstr("hung_ns"));
}

}  // namespace
}  // namespace kvferry
