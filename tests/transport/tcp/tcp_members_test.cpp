// Tests the TCP backend between members with keys of their own: only workers open connections, until they are revoked.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <vector>

#include "tests/transport/base/net/key_file.h"
#include "tests/transport/base/net/members_folder.h"
#include "tests/transport/transport_fixture.h"
#include "transport/make_transport.h"

namespace kvferry {
namespace {

using net::Role;
using ::testing::HasSubstr;
constexpr std::uint64_t kPulledBytes = 1 << 20;
constexpr auto kRevokedWithin = std::chrono::seconds(1);

class TcpMember {
 public:
  explicit TcpMember(net::ClusterKey key, net::Encrypt encrypt = net::Encrypt::kAlways) {
    TcpOptions options;
    options.listen_host = "127.0.0.1";
    options.key = std::move(key);
    options.encrypt = encrypt;
    transport_ = make_tcp_transport(options).value();
    own_ = transport_->register_region(memory_.data(), memory_.size()).value();
    exported_ = transport_->export_region(own_).value();
  }
  Transport& transport() { return *transport_; }
  /// Pulls the memory of the other, over a connection that the first call makes.
  Completion pull_from(TcpMember& other) {
    if (!peer_) peer_ = transport_->connect(other.transport_->address()).value();
    memory_.assign(kPulledBytes, std::byte{0});
    const auto submitted =
        transport_->submit({*peer_, Direction::kPull, own_, other.exported_, {{0, 0, kPulledBytes}}, "pulled"});
    if (!submitted) return {{}, submitted.error().code, submitted.error().what};
    const std::vector<Completion> done = wait_completions(*transport_, 1);
    EXPECT_EQ(done.size(), 1U);
    if (done.empty()) return {};
    EXPECT_EQ(done[0].code == ErrorCode::kOk, memory_ == other.memory_);
    return done[0];
  }

  /// Grants the first half of the memory. Returns the exported grant.
  std::string grant(const GrantTerms& terms) {
    return transport_->export_grant(transport_->grant(own_, 0, kPulledBytes / 2, terms).value()).value();
  }
  /// Moves one byte from or to the memory of the other by a grant.
  ErrorCode move(Direction direction, TcpMember& other, const std::string& grant) {
    const PeerId peer = transport_->connect(other.transport_->address()).value();
    EXPECT_TRUE(transport_->submit({peer, direction, own_, grant, {{0, 0, 1}}, "moved"}));
    const std::vector<Completion> done = wait_completions(*transport_, 1);
    return done.size() == 1 ? done[0].code : ErrorCode::kInternal;
  }

 private:
  std::vector<std::byte> memory_ = std::vector<std::byte>(kPulledBytes, std::byte{'m'});
  std::unique_ptr<Transport> transport_;
  RegionId own_;
  std::string exported_;
  std::optional<PeerId> peer_;
};

TEST(TcpMembers, OnlyWorkersAdminsAndTheHolderOfTheClusterKeyOpenConnections) {
  net::MembersFolder folder;
  const net::ClusterKey worker = folder.add("w", Role::kWorker), reader = folder.add("r", Role::kReader);
  const net::ClusterKey revoked = folder.add("x", Role::kWorker);
  folder.revoke("x");
  net::MembersFolder other(std::string(64, 'o'));
  struct Row {
    const char* who;
    net::ClusterKey key;
    bool is_served;
  };
  const Row rows[] = {{"worker", worker, true},
                      {"admin", folder.add("a", Role::kAdmin), true},
                      {"whole key", folder.read("cluster"), true},
                      {"reader", reader, false},
                      {"revoked", revoked, false},
                      {"worker of another deployment", other.add("o", Role::kWorker), false},
                      {"whole key without a list", net::ClusterKey(std::string(64, 'c')), false},
                      {"what workers share", worker.accepted_by_nodes().front(), false}};
  for (const char* serves : {"w", "cluster"}) {
    TcpMember server(folder.read(serves));
    for (const Row& row : rows) {
      TcpMember caller(row.key);
      const Completion done = caller.pull_from(server);
      EXPECT_EQ(done.code == ErrorCode::kOk, row.is_served) << row.who << " at " << serves << ": " << done.what;
    }
  }
}

TEST(TcpMembers, AGrantServesOnlyTheMemberToWhomItWasGiven) {
  net::MembersFolder folder;
  const net::ClusterKey given = folder.add("given", Role::kWorker), thief = folder.add("thief", Role::kWorker);
  for (const net::Encrypt encrypt : {net::Encrypt::kAlways, net::Encrypt::kNever}) {
    TcpMember server(folder.read("cluster"), encrypt);
    TcpMember callers[] = {TcpMember(given, encrypt), TcpMember(thief, encrypt),
                           TcpMember(folder.read("cluster"), encrypt)};
    const std::string bound = server.grant({.member = "given"}), open = server.grant({});
    for (const Direction direction : {Direction::kPush, Direction::kPull}) {
      for (TcpMember& caller : callers) {
        EXPECT_EQ(caller.move(direction, server, open), ErrorCode::kOk);
        EXPECT_EQ(caller.move(direction, server, bound), &caller == callers ? ErrorCode::kOk : ErrorCode::kRefused);
      }
    }
    EXPECT_EQ(server.transport().num_refused(), 4U);
  }
}

TEST(TcpMembers, WithoutAListOfMembersAGrantServesEveryPeerThatHasIt) {
  const net::ClusterKey key(std::string(64, 'c'));
  TcpMember server(key), caller(key);
  EXPECT_EQ(caller.move(Direction::kPush, server, server.grant({.member = "given"})), ErrorCode::kOk);
}

TEST(TcpMembers, AWorkerLeavesAServerThatIsNoMember) {
  net::MembersFolder folder;
  const net::ClusterKey worker = folder.add("w", Role::kWorker), revoked = folder.add("x", Role::kWorker);
  folder.revoke("x");
  TcpMember server(revoked), caller(folder.read("w"));
  const Completion done = caller.pull_from(server);
  EXPECT_EQ(done.code, ErrorCode::kPeerLost);
  EXPECT_THAT(done.what, HasSubstr("the peer is not a member with the role worker or admin"));
}

TEST(TcpMembers, BothEndsAgreeAboutEncryption) {
  using net::Encrypt;
  net::MembersFolder folder;
  const net::ClusterKey key = folder.add("w", Role::kWorker);
  for (const Encrypt asked : {Encrypt::kNever, Encrypt::kBetweenHosts, Encrypt::kAlways}) {
    for (const Encrypt allowed : {Encrypt::kNever, Encrypt::kAlways}) {
      TcpMember server(key, allowed), caller(key, asked);
      EXPECT_EQ(caller.pull_from(server).code == ErrorCode::kOk,
                asked == Encrypt::kAlways || allowed == Encrypt::kNever);
    }
  }
}

TEST(TcpMembers, ARevokedMembersConnectionsEndWithinASecondWhileOthersGoOn) {
  for (const net::Encrypt encrypt : {net::Encrypt::kAlways, net::Encrypt::kNever}) {
    net::MembersFolder folder;
    const net::ClusterKey server_key = folder.add("server", Role::kWorker), honest_key = folder.add("h", Role::kWorker);
    // The thief's own copy of the list does not change.
    net::MembersFolder copy;
    (void)copy.add("server", Role::kWorker);
    const net::ClusterKey thief_key = copy.add("thief", Role::kWorker);
    (void)folder.add("thief", Role::kWorker);
    TcpMember server(folder.read("server"), encrypt), honest(folder.read("h"), encrypt), thief(thief_key, encrypt);
    EXPECT_TRUE(net::reaches([&] {  // the server may not have read the last line yet
      TcpMember early(thief_key, encrypt);
      return early.pull_from(server).code == ErrorCode::kOk;
    }));
    EXPECT_EQ(thief.pull_from(server).code, ErrorCode::kOk);
    folder.revoke("thief");
    const auto revoked_at = std::chrono::steady_clock::now();
    while (std::chrono::steady_clock::now() < revoked_at + kRevokedWithin) {
      const Completion done = honest.pull_from(server);
      EXPECT_EQ(done.code, ErrorCode::kOk) << done.what;
    }
    EXPECT_NE(thief.pull_from(server).code, ErrorCode::kOk);
    TcpMember again(thief_key, encrypt);
    EXPECT_NE(again.pull_from(server).code, ErrorCode::kOk);
    EXPECT_EQ(honest.pull_from(server).code, ErrorCode::kOk);
  }
}

}  // namespace
}  // namespace kvferry
