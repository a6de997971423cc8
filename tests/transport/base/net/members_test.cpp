// Tests the files of members, and who can talk to a ZeroMQ server that has a list of them.
#include "transport/base/net/members.h"

#include <gmock/gmock.h>
#include <unistd.h>

#include <array>
#include <memory>

#include "tests/transport/base/net/key_file.h"
#include "tests/transport/base/net/members_folder.h"
#include "transport/base/clock.h"
#include "transport/base/net/zmq_socket.h"

namespace kvferry::net {
namespace {

using ::testing::HasSubstr;
constexpr TimeNs kRevokedWithin = kSecond;
constexpr int kRefusedAfterMs = 400;  // a handshake takes about 1 ms

TEST(Members, BothFilesAreReadAsTheyWereWritten) {
  MemberKey key{{"p-1", Role::kWorker}, {1, 2, 3}, shared_with(Role::kWorker, {"one key", "another key"})};
  EXPECT_EQ(parse_member_key(format_member_key(key)).value(), key);
  const std::vector<Member> members = {public_of(key), {{"router", Role::kReader}, {4}, {5}, {6}}};
  EXPECT_EQ(parse_members(format_members(members)).value(), members);
  EXPECT_TRUE(parse_members(format_members({})).value().empty());
}

TEST(Members, DamagedFilesAreRefused) {
  const MemberKey key{{"p-1", Role::kWorker}, {1}, shared_with(Role::kWorker, {"one key"})};
  const std::string own = format_member_key(key), list = format_members({public_of(key)});
  for (std::size_t bytes = 0; bytes < own.size(); ++bytes) EXPECT_FALSE(parse_member_key(own.substr(0, bytes)));
  for (std::size_t bytes = 0; bytes < list.size(); ++bytes) {
    const auto members = parse_members(list.substr(0, bytes));
    EXPECT_TRUE(!members || members->empty());
  }
  const auto with = [&](std::string_view from, std::string_view to) {
    std::string changed = list;
    return changed.replace(changed.find(from), from.size(), to);
  };
  EXPECT_FALSE(parse_members(with("worker", "none")));
  EXPECT_FALSE(parse_members(with("worker", "root")));
  EXPECT_FALSE(parse_members(with("p-1", "p_1")));
  EXPECT_FALSE(parse_members(with("p-1", "")));
  EXPECT_FALSE(parse_members(with("members 1", "members 2")));
  EXPECT_THAT(parse_members(list + list.substr(list.find('\n') + 1)).error().what,
              HasSubstr("two members with the name 'p-1'"));
}

TEST(Members, AMemberOwnsTheEngineIdsThatBeginWithItsName) {
  const Identity member{"p-1", Role::kWorker}, holder;
  for (const char* own : {"p-1", "p-1_dp0", "p-1.a"}) EXPECT_TRUE(member.owns(own)) << own;
  for (const char* foreign : {"", "p", "p-", "p-10", "p-1-a", "P-1", "p-2", "xp-1"})
    EXPECT_FALSE(member.owns(foreign)) << foreign;
  EXPECT_TRUE(holder.owns("anything"));
}

TEST(Members, ARouterHasNoKeyOfNodesAndNobodyButTheHolderHasTheClusterKey) {
  const std::string cluster_key = "a cluster key";
  const auto secret_of = [&](Role role) { return shared_with(role, {cluster_key}).front().secret; };
  EXPECT_EQ(secret_of(Role::kWorker), node_secret(cluster_key));
  EXPECT_EQ(secret_of(Role::kReader), router_secret(node_secret(cluster_key)));
  for (const Role role : {Role::kReader, Role::kWorker, Role::kAdmin})
    EXPECT_NE(secret_of(role), curve_secret(cluster_key)) << "it could pretend to be a controller";
}

TEST(Members, FilesThatOthersCouldHaveChangedAreRefused) {
  MembersFolder folder;
  (void)folder.add("p", Role::kWorker);
  folder.write("kvferry.members", format_members({}), 0662);
  EXPECT_THAT(read_cluster_key(folder.path() + "cluster.key").error().what, HasSubstr("only its owner may write it"));
  std::filesystem::remove(folder.path() + "kvferry.members");
  EXPECT_THAT(read_cluster_key(folder.path() + "p.key").error().what, HasSubstr("needs the list of members"));
}

TEST(Members, TheLongestListIsReadAndALongerFileIsRefused) {
  MembersFolder folder;
  std::vector<Member> members(65536);
  for (std::size_t i = 0; i < members.size(); ++i) members[i].identity = {fmt::format("{:0>63}", i), Role::kWorker};
  folder.write("kvferry.members", format_members(members), 0600);
  EXPECT_EQ(read_cluster_key(folder.path() + "cluster.key").value()->content()->members->size(), members.size());
  // A cut after 20 MiB and one byte would end a line.
  folder.write("kvferry.members", std::string(20 << 20, '-') + "\n" + format_members(members), 0600);
  EXPECT_THAT(read_cluster_key(folder.path() + "cluster.key").error().what, HasSubstr("the file exceeds 20 MiB"));
}

TEST(Members, ARemovedListRevokesNobody) {
  MembersFolder folder;
  const ClusterKey worker = folder.add("p", Role::kWorker), whole = folder.read("cluster");
  const std::string curve = hex_of(text_of(curve_public(worker.content()->own->curve_secret())));
  EXPECT_TRUE(whole.identity_of(curve));
  std::filesystem::remove(folder.path() + "kvferry.members");
  ::usleep(1'000'000);
  EXPECT_TRUE(whole.identity_of(curve));
}

/// A server that answers each message with the name and role of its sender.
class NamingServer {
 public:
  NamingServer(const ClusterKey& key, Servers servers) {
    auto context = std::make_shared<ZmqContext>(ZmqContext::kSocketsMaxDefault, key, servers);
    router_ = ZmqSocket::make(std::move(context), ZmqKind::kRouter).value();
    EXPECT_TRUE(router_->bind("tcp://127.0.0.1:0"));
  }
  const std::string& endpoint() const { return router_->endpoint(); }
  int num_revoked() const { return num_revoked_; }
  void turn() {
    std::array<ZmqPart, 2> parts;
    while (router_->receive(parts) > 0) {
      const Identity sender = router_->sender_of(parts);
      if (sender.role == Role::kNone) {
        ++num_revoked_;
        continue;
      }
      const std::string answer = fmt::format("{} {}", sender.name, name_of(sender.role));
      router_->send(std::array<std::string_view, 2>{parts[0].bytes(), answer});
    }
  }

 private:
  std::unique_ptr<ZmqSocket> router_;
  int num_revoked_ = 0;
};

class Caller {
 public:
  Caller(const NamingServer& server, const ClusterKey& key, Servers servers)
      : socket_(ZmqSocket::make(std::make_shared<ZmqContext>(ZmqContext::kSocketsMaxDefault, key, servers),
                                ZmqKind::kDealer, {.queues_unconnected = false})
                    .value()) {
    EXPECT_TRUE(socket_->connect(server.endpoint()));
  }
  /// Returns what the server calls this caller, or "" if it doesn't answer.
  std::string name_at(NamingServer& server, int limit_ms) {
    const SteadyClock clock;
    const TimeNs deadline = clock.now() + limit_ms * kMillisecond;
    for (bool is_sent = false; clock.now() < deadline; ::usleep(2000)) {
      is_sent = is_sent || socket_->send("who am I?");
      server.turn();
      ZmqPart answer;
      if (socket_->receive(std::span(&answer, 1)) == 1) return std::string(answer.bytes());
    }
    return "";
  }

 private:
  std::unique_ptr<ZmqSocket> socket_;
};

TEST(MembersOverZmq, ServersLearnWhoCallsAndRefuseAllOthers) {
  MembersFolder folder;
  const ClusterKey reader = folder.add("r", Role::kReader), worker = folder.add("w", Role::kWorker);
  const ClusterKey admin = folder.add("a", Role::kAdmin), whole = folder.read("cluster");
  const ClusterKey revoked = folder.add("x", Role::kAdmin);
  folder.revoke("x");
  MembersFolder other(std::string(64, 'o'));
  const ClusterKey foreign = other.add("w", Role::kWorker), without_list(std::string(64, 'c'));
  struct Row {
    const char* who;
    ClusterKey key;
    const char *at_controller, *at_node;
  };
  const Row rows[] = {{"reader", reader, "r reader", ""},
                      {"worker", worker, "w worker", "w worker"},
                      {"admin", admin, "a admin", "a admin"},
                      {"whole", whole, " admin", " admin"},
                      {"revoked", revoked, "", ""},
                      {"foreign", foreign, "", ""},
                      {"without list", without_list, " admin", ""}};
  for (const Servers servers : {Servers::kControllers, Servers::kNodes}) {
    NamingServer server(servers == Servers::kControllers ? folder.read("cluster") : folder.read("w"), servers);
    for (const Row& row : rows) {
      const std::string expected = servers == Servers::kControllers ? row.at_controller : row.at_node;
      Caller caller(server, row.key, servers);
      EXPECT_EQ(caller.name_at(server, expected.empty() ? kRefusedAfterMs : 20'000), expected)
          << row.who << (servers == Servers::kControllers ? " at a controller" : " at a node");
    }
  }
}

TEST(MembersOverZmq, NoMemberCanBeAController) {
  MembersFolder folder;
  const ClusterKey admin = folder.add("a", Role::kAdmin), worker = folder.add("w", Role::kWorker);
  const auto router = ZmqSocket::make(std::make_shared<ZmqContext>(8, admin), ZmqKind::kRouter).value();
  EXPECT_THAT(router->bind("tcp://127.0.0.1:0").error().what, HasSubstr("needs the cluster key itself"));
  // What a worker can do as a server of nodes doesn't help it to be a controller for others.
  NamingServer server(worker, Servers::kNodes);
  Caller caller(server, folder.read("w"), Servers::kControllers);
  EXPECT_EQ(caller.name_at(server, kRefusedAfterMs), "");
}

TEST(MembersOverZmq, ARevokedMembersConnectionEndsWithinASecondAndThoseOfOthersStay) {
  MembersFolder folder;
  const ClusterKey honest = folder.add("honest", Role::kWorker);
  for (const Servers servers : {Servers::kControllers, Servers::kNodes}) {
    (void)folder.add("thief", Role::kWorker);
    NamingServer server(folder.read(servers == Servers::kControllers ? "cluster" : "honest"), servers);
    Caller stays(server, honest, servers), ends(server, folder.read("thief"), servers);
    EXPECT_EQ(ends.name_at(server, 20'000), "thief worker");
    EXPECT_EQ(stays.name_at(server, 20'000), "honest worker");
    folder.revoke("thief");
    const SteadyClock clock;
    const TimeNs began_at = clock.now();
    while (clock.now() < began_at + kRevokedWithin) EXPECT_EQ(stays.name_at(server, 20'000), "honest worker");
    EXPECT_EQ(ends.name_at(server, kRefusedAfterMs), "");
    EXPECT_GE(server.num_revoked(), 1) << "the message on the former connection";
    EXPECT_EQ(ends.name_at(server, 2 * kRefusedAfterMs), "") << "a new connection";
    EXPECT_EQ(server.num_revoked(), 1) << "the connection has ended, and a new one is refused in its handshake";
    EXPECT_EQ(stays.name_at(server, 20'000), "honest worker");
  }
}

}  // namespace
}  // namespace kvferry::net
