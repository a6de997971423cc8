// Tests lies of a member, which has the cluster key: lies about every field of every message, to a node, to a
// controller and to a worker, each sent once and repeated later. No process ends, and honest nodes get right answers
// afterwards.
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <fstream>
#include <random>
#include <thread>

#include "connector/core/token_chain.h"
#include "controller/api/status.h"
#include "controller/client/client_link.h"
#include "controller/protocol/wire.h"
#include "tests/connector/runtime/test_node.h"
#include "tests/fuzz/examples.h"
#include "tests/fuzz/lies.h"
#include "transport/base/log.h"
#include "transport/base/secrets/secret_numbers.h"

namespace kvferry {
namespace {

using namespace fuzz;  // NOLINT(google-build-using-namespace)

/// The test's cluster key, in a file.
class Key {
 public:
  Key() {
    std::ofstream(path_) << std::string(64, 'k');
    ::chmod(path_.c_str(), 0600);
  }
  ~Key() { std::remove(path_.c_str()); }
  const std::string& path() const { return path_; }
  std::string setting() const { return R"(, "cluster_key_file": ")" + path_ + "\""; }
  std::optional<net::ClusterKey> read() const { return net::read_cluster_key(path_).value(); }
  ZmqContextRef context() const {
    return std::make_shared<net::ZmqContext>(net::ZmqContext::kSocketsMaxDefault, read());
  }

 private:
  std::string path_ = ::testing::TempDir() + fmt::format("member-lies-{}.key", ::getpid());
};

class MemberLies : public ::testing::Test {
 protected:
  MemberLies() { log().set_level(spdlog::level::off); }
  ~MemberLies() override { log().set_level(spdlog::level::info); }

  Key key_;
  TestController controller_{"tcp://127.0.0.1:0", key_.path()};
};

/// Prefills `prompt` for another node.
FinishedRequest hand_over(TestNode& prefill, const std::vector<std::int32_t>& prompt) {
  NewRequest first = new_request("p", prompt);
  first.handoff = true;
  prefill.scheduler->add_request(first);
  prefill.lookup("p");
  prefill.scheduler->allocated(first.id, 0, {kSomeBlocks});
  prefill.step({{{first.id, 0, first.num_prompt_tokens, BlockTable{kSomeBlocks}}}, {}},
               [&] { prefill.compute(kSomeBlocks, 0, first.num_prompt_tokens, 3); });
  const FinishedRequest done = prefill.scheduler->finished(first.id, first.num_prompt_tokens, {kSomeBlocks}, false);
  EXPECT_TRUE(done.handoff);
  return done;
}

/// Loads what was handed over, where every token is checked.
void expect_taken(TestNode& decode, const TestNode& prefill, const FinishedRequest& done,
                  const std::vector<std::int32_t>& prompt) {
  NewRequest second = new_request("d", prompt);
  second.source = HandoffSource{prefill.endpoint(), done.handoff_name, done.handoff_tokens};
  EXPECT_EQ(load(decode, second, 3), prompt.size() - 1);
}

void expect_handover(TestNode& prefill, TestNode& decode, const std::vector<std::int32_t>& prompt) {
  expect_taken(decode, prefill, hand_over(prefill, prompt), prompt);
}

/// Returns lies about the message in the envelope, and about the envelope itself.
std::vector<std::string> lies_about(const AnyMessage& message) {
  const std::string truth = encoded(message, 7);
  std::vector<std::string> lies = fuzz::lies_about(truth);
  Envelope envelope = decode<Envelope>(truth, "truth").value();
  for (std::string& body : fuzz::lies_about(std::string(envelope.body))) {
    envelope.body = std::move(body);
    lies.push_back(encode(envelope));
  }
  // the true message is a lie too, because this lease was not made and this push was not requested
  lies.push_back(truth);
  return lies;
}

/// Sends all lies in order, and then once more in another order.
template <class Send>
std::size_t tell(std::vector<std::string> lies, const Send& send) {
  for (const std::string& lie : lies) send(lie);
  std::shuffle(lies.begin(), lies.end(), std::mt19937(7));
  for (const std::string& lie : lies) send(lie);
  return lies.size();
}

std::uint64_t decode_id(const std::string& bytes) { return decode<Envelope>(bytes, "message").value().id; }

template <class Call>
bool soon(const Call& call) {
  const SteadyClock clock;
  for (const TimeNs deadline = clock.now() + 20 * kSecond; clock.now() < deadline; ::poll(nullptr, 0, 2))
    if (call()) return true;
  return false;
}

TEST_F(MemberLies, ToANode) {
  TestNode prefill(controller_.endpoint(), "prefill", "toy", key_.setting());
  TestNode decode(controller_.endpoint(), "decode", "toy", key_.setting());
  const ZmqContextRef context = key_.context();
  std::size_t num_lies = 0;
  for (TestNode* victim : {&prefill, &decode}) {
    const auto link = ClientSocket::connect(victim->endpoint(), context).value();
    for (const AnyMessage& message : examples_between_nodes()) {
      num_lies += tell(lies_about(message), [&](const std::string& lie) {
        ASSERT_TRUE(soon([&] { return link->send(lie); }));
        while (link->receive()) {
        }
      });
      victim->step();
    }
    // A lease is requested after all lies. Its answer shows that every lie was read.
    const std::uint64_t id = 4711;
    ASSERT_TRUE(link->send(seal(id, LeaseRequest{"toy", {ChunkKey{}}, "", {}})));
    EXPECT_TRUE(soon([&] {
      const auto answer = link->receive();
      return answer && decode_id(*answer) == id;
    }));
  }
  EXPECT_GE(num_lies, 500U);
  RecordProperty("lies", static_cast<int>(num_lies));
  expect_handover(prefill, decode, tokens(21));
}

TEST_F(MemberLies, AboutTheNumbersOfOthers) {
  TestNode holder(controller_.endpoint(), "holder", "toy", key_.setting());
  const std::vector<std::int32_t> prompt = tokens(16);
  holder.scheduler->add_request(new_request("p", prompt));
  holder.lookup("p");
  holder.scheduler->allocated(RequestId{"p"}, 0, {kSomeBlocks});
  holder.step({{{RequestId{"p"}, 0, 16, BlockTable{kSomeBlocks}}}, {}}, [&] { holder.compute(kSomeBlocks, 0, 16, 3); });
  holder.scheduler->finished(RequestId{"p"}, 16, {kSomeBlocks}, false);
  holder.settle();
  TokenChain chain(root_key("toy", ""), 8, {});
  chain.append(prompt);
  const ZmqContextRef context = key_.context();
  const auto reader = ClientSocket::connect(holder.endpoint(), context).value();
  const auto liar = ClientSocket::connect(holder.endpoint(), context).value();
  const auto send = [](ClientSocket& link, const std::string& message) {
    ASSERT_TRUE(soon([&] { return link.send(message); }));
  };
  const auto lease = [&](ClientSocket& link, const ChunkKey& key) {
    send(link, seal(5, LeaseRequest{"toy", {key}, "", {}}));
    std::optional<std::string> bytes;
    EXPECT_TRUE(soon([&] { return (bytes = link.receive()).has_value(); }));
    return decode<LeaseAnswer>(decode<Envelope>(*bytes, "answer")->body, "answer").value().reply.lease;
  };
  const std::uint64_t others = lease(*reader, chain.key(0)), own = lease(*liar, chain.key(1));
  ASSERT_NE(others, 0u);
  ASSERT_NE(own, 0u);
  SecretNumbers without_a_secret{{}};
  for (std::uint64_t step = 1; step <= 100; ++step)
    for (const std::uint64_t guess : {step, own + step, own - step, without_a_secret.draw()}) {
      send(*liar, seal(0, LeaseRelease{{guess}}));
      send(*liar, seal(0, PushSettlement{guess, {{0, true, 0, {9}}}}));
    }
  for (int i = 0; i < 2; ++i) send(*liar, seal(0, LeaseRelease{{own}}));
  const auto metric = [&](const char* name) { return holder.scheduler->metrics()[name]; };
  EXPECT_TRUE(soon([&] { return metric("unknown_releases_total") == 801; }));
  EXPECT_EQ(metric("pool_pinned_chunks"), 1) << "the reader's";
  send(*reader, seal(0, LeaseRelease{{others}}));
  EXPECT_TRUE(soon([&] { return metric("pool_pinned_chunks") == 0; }));
}

TEST_F(MemberLies, AboutAHandOffOfOthers) {
  TestNode prefill(controller_.endpoint(), "prefill", "toy", key_.setting());
  TestNode decode(controller_.endpoint(), "decode", "toy", key_.setting());
  const std::vector<std::int32_t> prompt = tokens(21);
  const FinishedRequest done = hand_over(prefill, prompt);
  prefill.settle();
  TokenChain chain(root_key("toy", ""), 8, {});
  chain.append(prompt);
  const auto metric = [&](const char* name) { return prefill.scheduler->metrics()[name]; };
  const double pinned = metric("pool_pinned_chunks");
  EXPECT_EQ(pinned, 3);
  const auto liar = ClientSocket::connect(prefill.endpoint(), key_.context()).value();
  for (const char* name : {"p", "p.", "p.0000000000000001"}) {
    ASSERT_TRUE(soon([&] { return liar->send(seal(5, LeaseRequest{"toy", {chain.key(0)}, name, {}})); }));
    std::optional<std::string> bytes;
    ASSERT_TRUE(soon([&] { return (bytes = liar->receive()).has_value(); }));
    const std::uint64_t lease =
        kvferry::decode<LeaseAnswer>(kvferry::decode<Envelope>(*bytes, "answer")->body, "answer").value().reply.lease;
    ASSERT_NE(lease, 0u);
    for (int i = 0; i < 2; ++i) ASSERT_TRUE(soon([&] { return liar->send(seal(0, LeaseRelease{{lease}})); }));
  }
  EXPECT_TRUE(soon([&] { return metric("unknown_releases_total") == 3; })) << "the second release of each lease";
  EXPECT_EQ(metric("unknown_handoffs_total"), 3);
  EXPECT_EQ(metric("pool_pinned_chunks"), pinned);
  expect_taken(decode, prefill, done, prompt);
  EXPECT_TRUE(soon([&] { return metric("pool_pinned_chunks") == 0; }));
}

TEST_F(MemberLies, ToAController) {
  const auto link = controller::make_link(controller_.endpoint(), {.cluster_key = key_.read()}).value();
  const auto send = [&](const std::string& lie) {
    const SteadyClock clock;
    ASSERT_TRUE(soon([&] {
      link->process(clock.now());
      while (link->receive()) {
      }
      return link->send(lie);
    }));
  };
  TestNode prefill(controller_.endpoint(), "prefill", "toy", key_.setting());
  TestNode decode(controller_.endpoint(), "decode", "toy", key_.setting());
  std::size_t num_lies = 0;
  for (const auto& message : examples_from_node()) {
    // the lies before may have ended the registration, so the node registers again
    send(encoded(examples_from_node()[0]));
    num_lies += tell(fuzz::lies_about(encoded(message)), send);
  }
  EXPECT_GE(num_lies, 500U);
  RecordProperty("lies", static_cast<int>(num_lies));
  const auto status = controller::fetch_status(controller_.endpoint(), 20'000, key_.read());
  ASSERT_TRUE(status) << status.error().what;
  EXPECT_GT(status->counters.messages_malformed, 100U);
  expect_handover(prefill, decode, tokens(21));
}

/// Sets the incarnation of a message to a node, because nodes ignore messages to an earlier incarnation.
void address(controller::wire::FromController& message, std::uint64_t incarnation) {
  std::visit(
      [&](auto& one) {
        if constexpr (requires { one.incarnation; }) one.incarnation = incarnation;
      },
      message);
}

TEST_F(MemberLies, OfAControllerToANode) {
  using namespace controller;  // NOLINT(google-build-using-namespace)
  const auto server = ServerSocket::bind("tcp://127.0.0.1:0", key_.context()).value();
  std::atomic<bool> is_over{false};
  std::atomic<std::size_t> num_lies{0};
  std::thread liar([&] {
    std::string node;
    std::uint64_t incarnation = 0;
    const auto serve = [&] {
      while (const auto message = server->receive()) {
        const auto said = wire::parse<wire::FromNode>(message->bytes);
        node = message->sender;
        if (const auto* hello = said ? std::get_if<wire::Hello>(&*said) : nullptr) {
          incarnation = hello->node.incarnation.value;
          server->send(node, encode(wire::Registered{.incarnation = incarnation}));
        }
      }
    };
    while (incarnation == 0 && !is_over) serve(), ::poll(nullptr, 0, 2);
    for (auto message : examples_from_controller()) {
      // skipped, because a node that gets this message stops for good
      if (std::holds_alternative<wire::Refused>(message)) continue;
      address(message, incarnation);
      num_lies += tell(fuzz::lies_about(encoded(message)), [&](const std::string& lie) {
        server->send(node, lie);
        serve();
      });
    }
    while (!is_over) serve(), ::poll(nullptr, 0, 2);
  });
  {
    TestNode node(server->endpoint(), "node", "toy", key_.setting());
    EXPECT_TRUE(soon([&] {
      node.step();
      return num_lies >= 500U;
    }));
    TestNode other(server->endpoint(), "other", "toy", key_.setting());
    expect_handover(node, other, tokens(21));
  }
  is_over = true;
  liar.join();
}

TEST_F(MemberLies, ToAWorker) {
  TestNode prefill(controller_.endpoint(), "prefill", "toy", key_.setting());
  TestNode decode(controller_.endpoint(), "decode", "toy", key_.setting());
  const auto hello = kvferry::decode<WorkerHello>(decode.worker->handshake(), "hello").value();
  const auto link = ClientSocket::connect(hello.link_endpoint).value();
  std::size_t num_lies = 0;
  for (const AnyMessage& message : examples_between_nodes()) {
    num_lies += tell(lies_about(message), [&](const std::string& lie) {
      ASSERT_TRUE(soon([&] { return link->send(lie); }));
      while (link->receive()) {
      }
    });
  }
  EXPECT_GE(num_lies, 500U);
  // Only the scheduler may send orders to a worker. The outcomes of these orders went to the liar, so the worker may
  // have lost slots.
  ASSERT_TRUE(link->send(seal(99, ChecksumOrder{99, 8, {}, {{{0, 1}, 8, 1}}, 1000, 0})));
  EXPECT_TRUE(soon([&] {
    const auto outcome = link->receive();
    return outcome && decode_id(*outcome) == 99;
  }));
}

}  // namespace
}  // namespace kvferry
