// Tests the addresses of members with keys of their own, in the backends that know a peer by the secret in its address:
// an address serves only as long as the key is accepted for which it was made. Over NCCL a peer is known by its TLS
// certificate.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "tests/transport/base/net/key_file.h"
#include "tests/transport/base/net/members_folder.h"
#include "tests/transport/sim_communicators.h"
#include "tests/transport/transport_fixture.h"
#include "tests/transport/ucx_over_tcp.h"
#include "transport/address_secret.h"
#include "transport/base/printable.h"
#include "transport/make_transport.h"
#include "transport/shared_memory.h"
#include "transport/shm/messages.h"

namespace kvferry {
namespace {

using net::Role;
using ::testing::HasSubstr;
using ::testing::Not;
using Key = std::optional<net::ClusterKey>;
constexpr std::uint64_t kMemberBytes = 64 << 10;
constexpr auto kEndedWithin = std::chrono::seconds(1);

/// A backend that knows peers by the secret in its address.
struct Way {
  const char* name;
  std::unique_ptr<Transport> (*make)(const Key& key);
  Result<std::string> (*change)(const std::string& address, const SecretChange& change);
  bool has_device = false;
};

template <bool kUsesMappings>
std::unique_ptr<Transport> make_member_shm(const Key& key) {
  ShmOptions options;
  options.key = key;
  options.use_mappings = kUsesMappings;
  options.use_cma = !kUsesMappings;
  return make_shm_transport(options).value();
}
std::unique_ptr<Transport> make_member_ucx(const Key& key) {
  let_ucx_use_tcp();
  UcxOptions options;
  options.key = key;
  options.packed_bytes_max = kMemberBytes;
  return make_ucx_transport(options).value();
}
std::unique_ptr<Transport> make_member_gpu_ipc(const Key& key) {
  GpuIpcOptions options;
  options.key = key;
  options.device = &process_gpu();
  return make_gpu_ipc_transport(options).value();
}
std::unique_ptr<Transport> make_member_plan(const Key& key) {
  TransportOptions options;
  options.common.key = key;
  options.path = Path::kShm;
  return make_transport(options).value();
}

const Way kWays[] = {{"shm", make_member_shm<true>, change_shm_secret},
                     {"cma", make_member_shm<false>, change_shm_secret},
                     {"ucx", make_member_ucx, change_ucx_secret},
                     {"gpu_ipc", make_member_gpu_ipc, change_gpu_ipc_secret, true},
                     {"planner", make_member_plan, change_secrets}};

std::string curve_key_of(const net::ClusterKey& key) {
  const auto content = key.content();
  if (content->own) return hex_of(net::text_of(net::public_of(*content->own).curve));
  return hex_of(net::text_of(net::curve_public(net::curve_secret(content->keys.front()))));
}

/// A transport with a region. Callers have no key: an address is all that they need.
class MemberSide {
 public:
  explicit MemberSide(const Way& way, const Key& key = {})
      : way_(way), memory_(SharedMemory::create("member", kMemberBytes).value()), transport_(way.make(key)) {
    MemoryRegion region = memory_.region();
    if (way.has_device) region = {.base = memory_.data(), .bytes = kMemberBytes, .device = &process_gpu()};
    region_ = transport_->register_region(region).value();
    exported_ = transport_->export_region(region_).value();
  }
  Transport& transport() { return *transport_; }
  const std::string& region() const { return exported_; }
  std::string grant(const GrantTerms& terms) {
    return transport_->export_grant(transport_->grant(region_, 0, kMemberBytes, terms).value()).value();
  }
  std::string address_for(const std::string& curve_key) const {
    return way_
        .change(transport_->address(),
                [&](const std::string& root) { return AddressSecret::personal(root, curve_key); })
        .value();
  }
  std::string address_for(const net::ClusterKey& key) const { return address_for(curve_key_of(key)); }

  Completion move(Direction direction, const std::string& address, const std::string& remote) {
    const Result<PeerId> peer = transport_->connect(address);
    if (!peer) return {{}, peer.error().code, peer.error().what};
    const auto sent = transport_->submit({*peer, direction, region_, remote, {{0, 0, kMemberBytes / 2}}, "moved"});
    if (!sent) return {{}, sent.error().code, sent.error().what};
    const std::vector<Completion> done = wait_completions(*transport_, 1);
    return done.size() == 1 ? done[0] : Completion{{}, ErrorCode::kTimeout, "no completion in time"};
  }
  ErrorCode pull(const std::string& address, const std::string& remote) {
    return move(Direction::kPull, address, remote).code;
  }

 private:
  const Way& way_;
  SharedMemory memory_;
  std::unique_ptr<Transport> transport_;
  RegionId region_;
  std::string exported_;
};

class MemberAddresses : public ::testing::TestWithParam<Way> {};
INSTANTIATE_TEST_SUITE_P(Ways, MemberAddresses, ::testing::ValuesIn(kWays),
                         [](const auto& test) { return std::string(test.param.name); });

TEST_P(MemberAddresses, ServeOnlyWorkersAdminsAndTheHolderOfTheClusterKey) {
  net::MembersFolder folder;
  const net::ClusterKey worker = folder.add("w", Role::kWorker), admin = folder.add("a", Role::kAdmin);
  const net::ClusterKey reader = folder.add("r", Role::kReader), revoked = folder.add("x", Role::kWorker);
  folder.revoke("x");
  for (const char* serves : {"w", "cluster"}) {
    MemberSide server(GetParam(), folder.read(serves));
    const std::string forged =
        GetParam()
            .change(server.address_for(worker),
                    [&](const std::string& of_worker) { return curve_key_of(admin) + of_worker.substr(64); })
            .value();
    const struct {
      const char* whose;
      std::string address;
      bool is_served;
    } rows[] = {{"worker", server.address_for(worker), true},
                {"admin", server.address_for(admin), true},
                {"whole key", server.address_for(folder.read("cluster")), true},
                {"reader", server.address_for(reader), false},
                {"revoked", server.address_for(revoked), false},
                {"unknown key", server.address_for(std::string(64, '0')), false},
                {"worker's, under the admin's key", forged, false},
                {"nobody's", server.transport().address(), false}};
    for (const auto& row : rows) {
      MemberSide caller(GetParam());
      const Completion done = caller.move(Direction::kPull, row.address, server.region());
      EXPECT_EQ(done.code == ErrorCode::kOk, row.is_served) << row.whose << " at " << serves << ": " << done.what;
      EXPECT_NE(done.code, ErrorCode::kTimeout) << row.whose;
    }
  }
}

TEST_P(MemberAddresses, WithoutAListOfMembersAreTheSameForAll) {
  for (const Key& key : {Key(), Key(net::ClusterKey(std::string(64, 'c')))}) {
    MemberSide server(GetParam(), key), caller(GetParam());
    EXPECT_EQ(caller.pull(server.transport().address(), server.region()), ErrorCode::kOk);
    EXPECT_NE(caller.pull(server.address_for(std::string(64, '0')), server.region()), ErrorCode::kOk);
  }
}

TEST_P(MemberAddresses, LetAGrantServeOnlyTheMemberToWhomItWasGiven) {
  if (GetParam().has_device) GTEST_SKIP() << "there are no grants of GPU memory";
  net::MembersFolder folder;
  const net::ClusterKey given = folder.add("given", Role::kWorker), thief = folder.add("thief", Role::kWorker);
  MemberSide server(GetParam(), folder.read("cluster"));
  const std::string bound = server.grant({.member = "given"}), open = server.grant({});
  for (const net::ClusterKey& key : {given, thief, folder.read("cluster")}) {
    MemberSide caller(GetParam());
    const std::string address = server.address_for(key);
    for (const Direction direction : {Direction::kPush, Direction::kPull}) {
      EXPECT_EQ(caller.move(direction, address, open).code, ErrorCode::kOk);
      const Completion done = caller.move(direction, address, bound);
      if (key == given) {
        EXPECT_EQ(done.code, ErrorCode::kOk) << done.what;
      } else {
        EXPECT_EQ(done.code, ErrorCode::kRefused);
        EXPECT_THAT(done.what, HasSubstr("only another member may use"));
      }
    }
  }
  MemberSide unlisted(GetParam(), net::ClusterKey(std::string(64, 'c'))), caller(GetParam());
  EXPECT_EQ(caller.pull(unlisted.transport().address(), unlisted.grant({.member = "given"})), ErrorCode::kOk)
      << "without a list, a grant serves every peer that has it";
}

TEST_P(MemberAddresses, OfARevokedMemberServeItNoLongerThanASecondWhileOthersGoOn) {
  net::MembersFolder folder;
  const net::ClusterKey honest = folder.add("h", Role::kWorker), thief = folder.add("t", Role::kWorker);
  MemberSide server(GetParam(), folder.read("cluster")), of_honest(GetParam()), of_thief(GetParam());
  const std::string honest_address = server.address_for(honest), thief_address = server.address_for(thief);
  EXPECT_EQ(of_honest.pull(honest_address, server.region()), ErrorCode::kOk);
  EXPECT_EQ(of_thief.pull(thief_address, server.region()), ErrorCode::kOk);
  folder.revoke("t");
  const auto revoked_at = std::chrono::steady_clock::now();
  while (std::chrono::steady_clock::now() < revoked_at + kEndedWithin)
    EXPECT_EQ(of_honest.pull(honest_address, server.region()), ErrorCode::kOk);
  const Completion refused = of_thief.move(Direction::kPull, thief_address, server.region());
  EXPECT_TRUE(refused.code == ErrorCode::kRefused || refused.code == ErrorCode::kPeerLost) << refused.what;
  MemberSide again(GetParam());
  const Completion new_one = again.move(Direction::kPush, thief_address, server.region());
  EXPECT_EQ(new_one.code, ErrorCode::kPeerLost);
  EXPECT_THAT(new_one.what, HasSubstr("whose key the peer does not accept"));
  EXPECT_EQ(of_honest.pull(honest_address, server.region()), ErrorCode::kOk);
}

TEST_P(MemberAddresses, NoPeerLearnsTheRootSecretFromANotification) {
  net::MembersFolder folder;
  const net::ClusterKey worker = folder.add("w", Role::kWorker);
  MemberSide server(GetParam(), worker), caller(GetParam(), worker);
  EXPECT_EQ(caller.pull(server.address_for(worker), server.region()), ErrorCode::kOk);
  const std::vector<Notification> notes = wait_notifications(server.transport(), 1);
  ASSERT_EQ(notes.size(), 1U);
  std::string root;
  std::ignore =
      GetParam().change(caller.transport().address(), [&](const std::string& secret) { return root = secret; });
  EXPECT_GE(root.size(), 16U);
  EXPECT_THAT(notes[0].from, Not(HasSubstr(root)));
}

TEST(AddressesForMembers, AreMadeOfAddressesOfTheSameTransportOnly) {
  for (const Way& way : kWays) EXPECT_FALSE(way.change("no address", [](const std::string& root) { return root; }));
  EXPECT_FALSE(address_for("", std::string(64, '0')));
  MemberSide side(kWays[0]);
  EXPECT_FALSE(address_for(side.transport().address(), std::string(64, '0')));
}

/// A transport over a simulated NCCL, whose control link is TCP.
struct NcclMember {
  explicit NcclMember(const net::ClusterKey& key) : device(1, SimDevice::Drive::kInBackground) {
    NcclOptions options;
    options.device = &device;
    options.key = key;
    options.control.listen_host = "127.0.0.1";
    options.silence_ns = kSecond;
    memory = {device.allocate(MemoryKind::kDevice, kMemberBytes).value(), kMemberBytes};
    transport = nccl::make_transport_over(make_sim_communicators(device), options).value();
    region = transport->register_region({.base = memory.data(), .bytes = kMemberBytes, .device = &device}).value();
    exported = transport->export_region(region).value();
  }
  ~NcclMember() {
    transport.reset();
    device.release(MemoryKind::kDevice, memory.data());
  }
  std::string grant(const GrantTerms& terms) const {
    return transport->export_grant(transport->grant(region, 0, kMemberBytes, terms).value()).value();
  }
  Completion move(Direction direction, const NcclMember& other, const std::string& remote) const {
    const PeerId peer = transport->connect(other.transport->address()).value();
    EXPECT_TRUE(transport->submit({peer, direction, region, remote, {{0, 0, kMemberBytes}}, "moved"}));
    const std::vector<Completion> done = wait_completions(*transport, 1);
    return done.size() == 1 ? done[0] : Completion{{}, ErrorCode::kTimeout, "no completion in time"};
  }

  SimDevice device;
  std::span<std::byte> memory;
  std::unique_ptr<Transport> transport;
  RegionId region;
  std::string exported;
};

TEST(NcclMembers, AGrantServesOnlyTheMemberToWhomItWasGiven) {
  net::MembersFolder folder;
  const net::ClusterKey given = folder.add("given", Role::kWorker), thief = folder.add("thief", Role::kWorker);
  const NcclMember server(folder.read("cluster"));
  const std::string bound = server.grant({.member = "given"}), open = server.grant({});
  for (const net::ClusterKey& key : {given, thief, folder.read("cluster")}) {
    const NcclMember caller(key);
    for (const Direction direction : {Direction::kPush, Direction::kPull}) {
      EXPECT_EQ(caller.move(direction, server, open).code, ErrorCode::kOk);
      EXPECT_EQ(caller.move(direction, server, bound).code, key == given ? ErrorCode::kOk : ErrorCode::kRefused);
    }
  }
}

TEST(NcclMembers, ARevokedMembersSessionEndsWithinASecondWhileOthersGoOn) {
  net::MembersFolder folder, copy;
  const net::ClusterKey server_key = folder.add("server", Role::kWorker), honest_key = folder.add("h", Role::kWorker);
  std::ignore = copy.add("server", Role::kWorker);
  const net::ClusterKey thief_key = copy.add("thief", Role::kWorker);  // its own copy of the list does not change
  std::ignore = folder.add("thief", Role::kWorker);
  const NcclMember server(folder.read("server")), honest(folder.read("h")), thief(thief_key);
  EXPECT_EQ(thief.move(Direction::kPull, server, server.exported).code, ErrorCode::kOk);
  folder.revoke("thief");
  const auto revoked_at = std::chrono::steady_clock::now();
  while (std::chrono::steady_clock::now() < revoked_at + kEndedWithin)
    EXPECT_EQ(honest.move(Direction::kPull, server, server.exported).code, ErrorCode::kOk);
  for (int attempt = 0; attempt < 2; ++attempt)
    EXPECT_EQ(thief.move(Direction::kPull, server, server.exported).code, ErrorCode::kPeerLost);
  EXPECT_EQ(honest.move(Direction::kPush, server, server.exported).code, ErrorCode::kOk);
}

}  // namespace
}  // namespace kvferry
