// Tests pushes between members with keys of their own: only the member that offered a push writes by its grants, even
// if another member has learnt them, and a purge of that member finds the push.
#include <gtest/gtest.h>
#include <poll.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "connector/runtime/links/node_wire.h"
#include "connector/runtime/links/shapes.h"
#include "connector/runtime/links/zmq_link.h"
#include "controller/api/admin_command.h"
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

/// A decode node, and the connection of another member's node to it.
class MemberGrants : public ::testing::Test {
 protected:
  /// Sends a message as "prefill", and returns the body of the answer.
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
  /// Offers a chunk, with an address that is another's.
  PushAnswer offer() {
    const auto shape = decode<LeaseAnswer>(ask(LeaseRequest{"toy", {ChunkKey{}}, {}, {}}), "answer").value();
    PushOffer offer{"toy", 1, shards_of(shape.ranks), {}};
    offer.chunks = {{root_key("a", "chunk"), 8, {}}};
    offer.from = "tcp://another:1";
    return decode<PushAnswer>(ask(offer), "answer").value();
  }

  net::MembersFolder folder_;
  const net::ClusterKey decoders_ = folder_.add("decode", net::Role::kWorker);
  const net::ClusterKey offerer_ = folder_.add("prefill", net::Role::kWorker);
  const net::ClusterKey thief_ = folder_.add("thief", net::Role::kWorker);
  TestController controller_{"tcp://127.0.0.1:0", folder_.path() + "cluster.key"};
  TestNode decoder_{controller_.endpoint(), "decode", "toy",
                    R"(, "path": "tcp", "cluster_key_file": ")" + folder_.path() + R"(decode.key")"};
  std::unique_ptr<ClientSocket> link_ =
      ClientSocket::connect(decoder_.endpoint(), std::make_shared<net::ZmqContext>(net::ZmqContext::kSocketsMaxDefault,
                                                                                   offerer_, net::Servers::kNodes))
          .value();
};

TEST_F(MemberGrants, ServeNobodyButTheMemberThatOfferedThePush) {
  const PushAnswer answer = offer();
  ASSERT_EQ(answer.ranks.size(), 1U);
  ASSERT_EQ(answer.grants.at(0).size(), 1U);
  const std::string &address = answer.ranks[0].transport_address, &grant = answer.grants[0][0];
  ASSERT_FALSE(grant.empty());
  EXPECT_EQ(move(thief_, Direction::kPush, address, grant), ErrorCode::kRefused);
  EXPECT_EQ(move(folder_.read("cluster"), Direction::kPush, address, grant), ErrorCode::kRefused);
  EXPECT_EQ(move(offerer_, Direction::kPull, address, grant), ErrorCode::kRefused) << "a push's grant allows no reads";
  EXPECT_EQ(move(offerer_, Direction::kPush, address, grant), ErrorCode::kOk);
  decoder_.step();
  EXPECT_EQ(decoder_.scheduler->metrics()["accesses_refused_total"], 3);
}

TEST_F(MemberGrants, AreTakenBackWithAllThatTheMemberPushedUnderAnotherAddress) {
  const auto purged = [&](const std::string& member) {
    EXPECT_TRUE(controller::run_admin_command(
        controller_.endpoint(), {.verb = "purge", .name_space = "default", .engine_id = "member:" + member}, 20'000,
        folder_.read("cluster")));
  };
  EXPECT_EQ(offer().reply.verdicts.at(0), static_cast<std::uint8_t>(PushVerdict::kGranted));
  purged("thief");
  EXPECT_EQ(offer().reply.refused, "");
  EXPECT_EQ(decoder_.scheduler->metrics()["purged_chunks_total"], 0);
  purged("prefill");
  const SteadyClock clock;
  std::string refused;
  for (const TimeNs deadline = clock.now() + 20 * kSecond; refused.empty() && clock.now() < deadline;)
    refused = offer().reply.refused;
  EXPECT_EQ(refused, "KV of node tcp://another:1 of member 'prefill' is not accepted: an operator has purged it");
  EXPECT_EQ(decoder_.scheduler->metrics()["purged_chunks_total"], 1);
}

}  // namespace
}  // namespace kvferry
