// Tests the grants and addresses of a push between members with keys of their own: only the member that offered the
// push writes by its grants, even if another member has learnt them, and no longer than until it is revoked; a purge of
// that member finds the push.
#include <gtest/gtest.h>
#include <poll.h>

#include <chrono>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "connector/runtime/links/node_wire.h"
#include "connector/runtime/links/shapes.h"
#include "connector/runtime/links/zmq_link.h"
#include "controller/api/admin_command.h"
#include "tests/connector/runtime/test_node.h"
#include "tests/transport/base/net/key_file.h"
#include "tests/transport/base/net/members_folder.h"
#include "tests/transport/transport_fixture.h"
#include "tests/transport/ucx_over_tcp.h"
#include "transport/make_transport.h"

namespace kvferry {
namespace {

constexpr std::uint64_t kBytes = 64;

/// Moves the first bytes of a grant as this member would.
ErrorCode move(Path path, const net::ClusterKey& key, Direction direction, const std::string& address,
               const std::string& grant) {
  TransportOptions options;
  options.path = path;
  options.tcp.listen_host = "127.0.0.1";
  options.common.key = key;
  std::vector<std::byte> memory(kBytes);
  const auto transport = make_transport(options).value();
  const RegionId region = transport->register_region(memory.data(), memory.size()).value();
  const PeerId peer = transport->connect(address).value();
  EXPECT_TRUE(transport->submit({peer, direction, region, grant, {{0, 0, kBytes}}, ""}));
  const std::vector<Completion> done = wait_completions(*transport, 1);
  transport->shutdown();
  return done.size() == 1 ? done[0].code : ErrorCode::kInternal;
}

/// The connection of a member's scheduler to another node.
class Offerer {
 public:
  Offerer(const std::string& endpoint, const net::ClusterKey& key)
      : link_(ClientSocket::connect(endpoint, std::make_shared<net::ZmqContext>(net::ZmqContext::kSocketsMaxDefault,
                                                                                key, net::Servers::kNodes))
                  .value()) {}
  /// Offers a chunk, as the node at address `from`.
  PushAnswer answer_to(const std::string& chunk, const std::string& from = {}) {
    const auto shape = decode<LeaseAnswer>(ask(LeaseRequest{"toy", {ChunkKey{}}, {}, {}}), "answer").value();
    PushOffer offer{"toy", 1, shards_of(shape.ranks), {}};
    offer.chunks = {{root_key("a", chunk), 8, {}}};
    offer.from = from;
    return decode<PushAnswer>(ask(offer), "answer").value();
  }
  /// Offers a chunk. Returns the address and the grant in the answer.
  std::pair<std::string, std::string> offer(const std::string& chunk) {
    const PushAnswer answer = answer_to(chunk);
    EXPECT_EQ(answer.ranks.size(), 1U);
    EXPECT_EQ(answer.grants.size(), 1U);
    if (answer.ranks.empty() || answer.grants.empty() || answer.grants[0].empty()) return {};
    EXPECT_FALSE(answer.grants[0][0].empty());
    return {answer.ranks[0].transport_address, answer.grants[0][0]};
  }

 private:
  template <class Body>
  std::string ask(const Body& body) {
    std::optional<std::string> bytes;
    bool is_sent = false;
    const SteadyClock clock;
    for (const TimeNs deadline = clock.now() + 20 * kSecond; !bytes && clock.now() < deadline; ::poll(nullptr, 0, 2)) {
      is_sent = is_sent || link_->send(seal(5, body));
      bytes = link_->receive();
    }
    EXPECT_TRUE(bytes) << "no answer";
    return bytes ? decode<Envelope>(*bytes, "answer").value().body : std::string();
  }
  const std::unique_ptr<ClientSocket> link_;
};

std::string settings(const net::MembersFolder& folder, const std::string& path) {
  return R"(, "path": ")" + path + R"(", "cluster_key_file": ")" + folder.path() + R"(decode.key")";
}

TEST(MemberGrants, ServeNobodyButTheMemberThatOfferedThePush) {
  net::MembersFolder folder;
  (void)folder.add("decode", net::Role::kWorker);
  const net::ClusterKey offerer = folder.add("prefill", net::Role::kWorker);
  const net::ClusterKey thief = folder.add("thief", net::Role::kWorker);
  TestController controller("tcp://127.0.0.1:0", folder.path() + "cluster.key");
  TestNode decoder(controller.endpoint(), "decode", "toy", settings(folder, "tcp"));
  const auto [address, grant] = Offerer(decoder.endpoint(), offerer).offer("chunk");
  constexpr Path kTcp = Path::kTcp;
  EXPECT_EQ(move(kTcp, thief, Direction::kPush, address, grant), ErrorCode::kRefused);
  EXPECT_EQ(move(kTcp, folder.read("cluster"), Direction::kPush, address, grant), ErrorCode::kRefused);
  EXPECT_EQ(move(kTcp, offerer, Direction::kPull, address, grant), ErrorCode::kRefused)
      << "a push's grant allows no reads";
  EXPECT_EQ(move(kTcp, offerer, Direction::kPush, address, grant), ErrorCode::kOk);
  decoder.step();
  EXPECT_EQ(decoder.scheduler->metrics()["accesses_refused_total"], 3);
}

TEST(MemberGrants, AreTakenBackWithAllThatTheMemberPushedUnderAnotherAddress) {
  net::MembersFolder folder;
  (void)folder.add("decode", net::Role::kWorker);
  const net::ClusterKey member = folder.add("prefill", net::Role::kWorker);
  TestController controller("tcp://127.0.0.1:0", folder.path() + "cluster.key");
  TestNode decoder(controller.endpoint(), "decode", "toy", settings(folder, "tcp"));
  Offerer offerer(decoder.endpoint(), member);
  const auto offer = [&] { return offerer.answer_to("chunk", "tcp://another:1").reply; };
  const auto purged = [&](const std::string& name) {
    EXPECT_TRUE(controller::run_admin_command(controller.endpoint(),
                                              {.verb = "purge", .name_space = "default", .engine_id = "member:" + name},
                                              20'000, folder.read("cluster")));
  };
  EXPECT_EQ(offer().verdicts.at(0), static_cast<std::uint8_t>(PushVerdict::kGranted));
  purged("thief");
  EXPECT_EQ(offer().refused, "");
  EXPECT_EQ(decoder.scheduler->metrics()["purged_chunks_total"], 0);
  purged("prefill");
  const SteadyClock clock;
  std::string refused;
  for (const TimeNs deadline = clock.now() + 20 * kSecond; refused.empty() && clock.now() < deadline;)
    refused = offer().refused;
  EXPECT_EQ(refused, "KV of node tcp://another:1 of member 'prefill' is not accepted: an operator has purged it");
  EXPECT_EQ(decoder.scheduler->metrics()["purged_chunks_total"], 1);
}

class MemberAddressesOfANode : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Paths, MemberAddressesOfANode, ::testing::Values("shm", "cma", "ucx"),
                         [](const auto& test) { return std::string(test.param); });

TEST_P(MemberAddressesOfANode, ServeTheMemberThatAskedUntilItIsRevoked) {
  if (GetParam() == std::string_view("ucx")) let_ucx_use_tcp();
  net::MembersFolder folder;
  (void)folder.add("decode", net::Role::kWorker);
  const net::ClusterKey offerer = folder.add("prefill", net::Role::kWorker);
  const net::ClusterKey thief = folder.add("thief", net::Role::kWorker);
  TestController controller("tcp://127.0.0.1:0", folder.path() + "cluster.key");
  TestNode decoder(controller.endpoint(), "decode", "toy", settings(folder, GetParam()));
  const auto [address, grant] = Offerer(decoder.endpoint(), offerer).offer("chunk");
  const auto [thiefs_address, thiefs_grant] = Offerer(decoder.endpoint(), thief).offer("another chunk");
  EXPECT_NE(address, thiefs_address);
  const Path path = parse_path(GetParam()).value();
  EXPECT_EQ(move(path, thief, Direction::kPush, thiefs_address, thiefs_grant), ErrorCode::kOk);
  EXPECT_EQ(move(path, thief, Direction::kPush, thiefs_address, grant), ErrorCode::kRefused);
  EXPECT_EQ(move(path, offerer, Direction::kPush, address, grant), ErrorCode::kOk);
  folder.revoke("thief");
  ::poll(nullptr, 0, 1000);
  EXPECT_EQ(move(path, thief, Direction::kPush, thiefs_address, thiefs_grant), ErrorCode::kPeerLost);
  EXPECT_EQ(move(path, offerer, Direction::kPush, address, grant), ErrorCode::kOk);
}

}  // namespace
}  // namespace kvferry
