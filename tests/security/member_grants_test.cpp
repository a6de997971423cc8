// Tests the grants of a push between members with keys of their own: only the member that offered the push writes by
// them, even if another member has learnt them.
#include <gtest/gtest.h>
#include <poll.h>

#include <optional>
#include <string>
#include <vector>

#include "connector/runtime/links/node_wire.h"
#include "connector/runtime/links/shapes.h"
#include "connector/runtime/links/zmq_link.h"
#include "tests/connector/runtime/test_node.h"
#include "tests/transport/base/net/members_folder.h"
#include "tests/transport/transport_fixture.h"
#include "transport/make_transport.h"

namespace kvferry {
namespace {

constexpr std::uint64_t kBytes = 64;

/// Moves the first bytes of a grant as this member would.
ErrorCode move(const net::ClusterKey& key, Direction direction, const std::string& address, const std::string& grant) {
  TransportOptions options;
  options.path = Path::kTcp;
  options.tcp.listen_host = "127.0.0.1";
  options.tcp.key = key;
  std::vector<std::byte> memory(kBytes);
  const auto transport = make_transport(options).value();
  const RegionId region = transport->register_region(memory.data(), memory.size()).value();
  const PeerId peer = transport->connect(address).value();
  EXPECT_TRUE(transport->submit({peer, direction, region, grant, {{0, 0, kBytes}}, ""}));
  const std::vector<Completion> done = wait_completions(*transport, 1);
  transport->shutdown();
  return done.size() == 1 ? done[0].code : ErrorCode::kInternal;
}

TEST(MemberGrants, ServeNobodyButTheMemberThatOfferedThePush) {
  net::MembersFolder folder;
  (void)folder.add("decode", net::Role::kWorker);
  const net::ClusterKey offerer = folder.add("prefill", net::Role::kWorker);
  const net::ClusterKey thief = folder.add("thief", net::Role::kWorker);
  TestController controller("tcp://127.0.0.1:0", folder.path() + "cluster.key");
  TestNode decoder(controller.endpoint(), "decode", "toy",
                   R"(, "path": "tcp", "cluster_key_file": ")" + folder.path() + R"(decode.key")");
  const auto link =
      ClientSocket::connect(decoder.endpoint(), std::make_shared<net::ZmqContext>(net::ZmqContext::kSocketsMaxDefault,
                                                                                  offerer, net::Servers::kNodes))
          .value();
  const auto ask = [&](const auto& body) {
    std::optional<std::string> bytes;
    bool is_sent = false;
    const SteadyClock clock;
    for (const TimeNs deadline = clock.now() + 20 * kSecond; !bytes && clock.now() < deadline; ::poll(nullptr, 0, 2)) {
      is_sent = is_sent || link->send(seal(5, body));
      bytes = link->receive();
    }
    EXPECT_TRUE(bytes) << "no answer";
    return bytes ? decode<Envelope>(*bytes, "answer").value().body : std::string();
  };
  const auto shape = decode<LeaseAnswer>(ask(LeaseRequest{"toy", {ChunkKey{}}, {}, {}}), "answer").value();
  PushOffer offer{"toy", 1, shards_of(shape.ranks), {}};
  offer.chunks = {{root_key("a", "chunk"), 8, {}}};
  const PushAnswer answer = decode<PushAnswer>(ask(offer), "answer").value();
  ASSERT_EQ(answer.ranks.size(), 1U);
  ASSERT_EQ(answer.grants.at(0).size(), 1U);
  const std::string &address = answer.ranks[0].transport_address, &grant = answer.grants[0][0];
  ASSERT_FALSE(grant.empty());
  EXPECT_EQ(move(thief, Direction::kPush, address, grant), ErrorCode::kRefused);
  EXPECT_EQ(move(folder.read("cluster"), Direction::kPush, address, grant), ErrorCode::kRefused);
  EXPECT_EQ(move(offerer, Direction::kPull, address, grant), ErrorCode::kRefused) << "a push's grant allows no reads";
  EXPECT_EQ(move(offerer, Direction::kPush, address, grant), ErrorCode::kOk);
  decoder.step();
  EXPECT_EQ(decoder.scheduler->metrics()["accesses_refused_total"], 3);
}

}  // namespace
}  // namespace kvferry
