// Tests pushes between two real nodes: real transport, real messages, blocks of real memory, but no model.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <numeric>
#include <thread>

#include "connector/core/token_chain.h"
#include "connector/runtime/links/node_wire.h"
#include "connector/runtime/links/push_links.h"
#include "connector/runtime/links/shapes.h"
#include "connector/runtime/links/zmq_link.h"
#include "tests/connector/runtime/test_node.h"

namespace kvferry {
namespace {

using namespace std::chrono_literals;

class Pushes : public ::testing::Test {
 protected:
  std::vector<std::int32_t> prompt(std::uint32_t count, std::int32_t first = 100) {
    std::vector<std::int32_t> made(count);
    std::iota(made.begin(), made.end(), first);
    return made;
  }
  /// Prefills in steps of `per_step` tokens. `by_layer`: reports each layer, as most models do.
  FinishedRequest prefill(TestNode& node, const std::string& id, const std::vector<std::int32_t>& tokens, float seed,
                          const std::string& push_to, bool by_layer = true, std::uint32_t per_step = 1000) {
    NewRequest made = new_request(id, tokens);
    made.handoff = true;
    made.push_to = push_to;
    node.scheduler->add_request(made);
    const std::uint32_t n = made.num_prompt_tokens;
    const std::uint32_t have = node.lookup(id);
    node.scheduler->allocated(made.id, have, {kSomeBlocks});
    for (std::uint32_t done = have; done < n;) {
      const std::uint32_t now = std::min(per_step, n - done);
      std::optional<BlockTable> table;
      if (done == have) table = BlockTable{kSomeBlocks};
      node.step({{{made.id, done, now, table}}, {}}, [&] {
        node.compute(kSomeBlocks, done, done + now, seed);
        for (std::uint32_t layer = 0; by_layer && layer < TestNode::kLayers; ++layer) node.worker->save_layer(layer);
        std::this_thread::sleep_for(before_save_);
      });
      done += now;
    }
    const FinishedRequest finished = node.scheduler->finished(made.id, n, {kSomeBlocks}, false);
    node.step();
    return finished;
  }
  /// Returns the request that a router sends to the decode node when the prefill is over.
  static NewRequest handed_over(const std::string& id, const std::vector<std::int32_t>& tokens, const TestNode& from) {
    NewRequest made = new_request(id, tokens);
    made.source = HandoffSource{from.endpoint(), "p", made.num_prompt_tokens};
    return made;
  }
  static bool eventually(const std::function<bool()>& is_true) {
    for (int i = 0; i < 2000; ++i) {
      if (is_true()) return true;
      std::this_thread::sleep_for(5ms);
    }
    return false;
  }

  TestController controller_;
  std::chrono::milliseconds before_save_{0};  // time that the forward pass needs after its last layer
};

TEST_F(Pushes, CarryAPromptLayerByLayerBeforeItsRequestComes) {
  TestNode prefiller(controller_.endpoint(), "prefill"), decoder(controller_.endpoint(), "decode");
  const auto tokens = prompt(21);
  prefill(prefiller, "p", tokens, 1, decoder.endpoint());
  ASSERT_TRUE(eventually([&] { return decoder.scheduler->metrics()["received_chunks_total"] == 3; }));
  EXPECT_EQ(load(decoder, handed_over("d", tokens, prefiller), 1), 20u);
  EXPECT_EQ(decoder.scheduler->metrics()["pulls_total"], 0);
  EXPECT_EQ(prefiller.scheduler->metrics()["pushed_chunks_total"], 3);
  EXPECT_EQ(prefiller.scheduler->metrics()["push_failures_total"], 0);
  EXPECT_TRUE(eventually([&] { return prefiller.scheduler->metrics()["open_pushes"] == 0; }));
  EXPECT_EQ(decoder.scheduler->metrics()["open_push_reservations"], 0);
}

TEST_F(Pushes, EndWhereTheirPlaceIsFoundBetweenTheLastLayerAndTheSave) {
  TestNode prefiller(controller_.endpoint(), "prefill"), decoder(controller_.endpoint(), "decode");
  before_save_ = 300ms;  // the first contact of the nodes takes a few ms
  prefill(prefiller, "p", prompt(24), 1, decoder.endpoint());
  ASSERT_TRUE(eventually([&] { return decoder.scheduler->metrics()["received_chunks_total"] == 3; }));
  EXPECT_EQ(load(decoder, new_request("d", prompt(24)), 1), 23u);
}

TEST_F(Pushes, GoWholeWhereLayersAreNotTold) {
  TestNode prefiller(controller_.endpoint(), "prefill"), decoder(controller_.endpoint(), "decode");
  const auto tokens = prompt(24);
  prefill(prefiller, "p", tokens, 2, decoder.endpoint(), false);
  ASSERT_TRUE(eventually([&] { return decoder.scheduler->metrics()["received_chunks_total"] == 3; }));
  EXPECT_EQ(load(decoder, new_request("d", tokens), 2), 23u);
  EXPECT_EQ(decoder.scheduler->metrics()["pulls_total"], 0);
}

TEST_F(Pushes, FollowAChunkedPrefill) {
  TestNode prefiller(controller_.endpoint(), "prefill"), decoder(controller_.endpoint(), "decode");
  const auto tokens = prompt(27);
  prefill(prefiller, "p", tokens, 3, decoder.endpoint(), true, 5);
  ASSERT_TRUE(eventually([&] { return decoder.scheduler->metrics()["received_chunks_total"] == 4; }));
  EXPECT_EQ(load(decoder, handed_over("d", tokens, prefiller), 3), 26u);
  EXPECT_EQ(decoder.scheduler->metrics()["pulls_total"], 0);
}

TEST_F(Pushes, TakeNothingThatIsThereAlready) {
  TestNode prefiller(controller_.endpoint(), "prefill"), decoder(controller_.endpoint(), "decode");
  prefill(prefiller, "p", prompt(16), 4, decoder.endpoint());
  ASSERT_TRUE(eventually([&] { return decoder.scheduler->metrics()["received_chunks_total"] == 2; }));
  // Both pools have two of the chunks; the third chunk is new.
  prefill(prefiller, "q", prompt(24), 4, decoder.endpoint());
  ASSERT_TRUE(eventually([&] { return decoder.scheduler->metrics()["received_chunks_total"] == 3; }));
  EXPECT_EQ(load(decoder, new_request("d", prompt(24)), 4), 23u);
}

TEST_F(Pushes, ComeFromThePoolWhereThePrefillComputesNothing) {
  TestNode prefiller(controller_.endpoint(), "prefill"), decoder(controller_.endpoint(), "decode"),
      other(controller_.endpoint(), "other");
  prefill(prefiller, "p", prompt(16), 5, decoder.endpoint());
  prefill(prefiller, "q", prompt(16), 5, other.endpoint());
  ASSERT_TRUE(eventually([&] { return other.scheduler->metrics()["received_chunks_total"] == 2; }));
  EXPECT_EQ(load(other, new_request("d", prompt(16)), 5), 15u);
}

TEST_F(Pushes, AreNotAnsweredByANodeThatWasNotAsked) {
  TestNode prefiller(controller_.endpoint(), "prefill"), decoder(controller_.endpoint(), "decode");
  const auto liar = ServerSocket::bind("tcp://127.0.0.1:*").value();
  prefill(prefiller, "p", prompt(8), 1, liar->endpoint());
  std::optional<ServerSocket::Message> asked;
  ASSERT_TRUE(eventually([&] { return (asked = liar->receive()).has_value(); }));
  const Envelope offer = decode<Envelope>(asked->bytes, "offer").value();
  ASSERT_EQ(offer.type, kMessageType<PushOffer>);
  // The liar guesses the number of the next push, which is greater by 1. It answers that the chunks are wanted at its
  // address, before the decode node can answer.
  PushAnswer answer{{77, {}, {2, 2, 2}}, {{"an address", "", 1, {}}}, {{"grant", "grant", "grant"}}};
  ASSERT_TRUE(liar->send(asked->sender, seal(offer.id + 1, answer)));
  ASSERT_TRUE(eventually([&] { return prefiller.scheduler->metrics()["unasked_answers_total"] == 1; }));
  prefill(prefiller, "q", prompt(24, 5000), 1, decoder.endpoint());
  ASSERT_TRUE(eventually([&] { return decoder.scheduler->metrics()["received_chunks_total"] == 3; }));
  EXPECT_EQ(prefiller.scheduler->metrics()["push_failures_total"], 0);
}

TEST_F(Pushes, ToANodeThatIsNotThereCostNothing) {
  TestNode prefiller(controller_.endpoint(), "prefill");
  prefill(prefiller, "p", prompt(16), 6, "tcp://127.0.0.1:1");
  prefill(prefiller, "q", prompt(16), 6, "no address");
  EXPECT_EQ(load(prefiller, new_request("d", prompt(16)), 6), 15u);
}

TEST_F(Pushes, OfAnotherModelAreRefused) {
  TestNode prefiller(controller_.endpoint(), "prefill", "toy", R"(, "namespace": "a")"),
      decoder(controller_.endpoint(), "decode", "other", R"(, "namespace": "b")");
  prefill(prefiller, "p", prompt(16), 7, decoder.endpoint());
  EXPECT_TRUE(eventually([&] { return prefiller.scheduler->metrics()["open_pushes"] == 0; }));
  EXPECT_EQ(decoder.scheduler->metrics()["received_chunks_total"], 0);
}

/// The address contains the secret with which the pool can be read.
TEST_F(Pushes, AndLeasesTellNoAddressToWhomNothingIsGiven) {
  TestNode node(controller_.endpoint(), "node");
  prefill(node, "p", prompt(16), 1, "tcp://127.0.0.1:1");
  TokenChain chain(root_key("toy", ""), 8, {});
  chain.append(prompt(16));
  const auto link = ClientSocket::connect(node.endpoint()).value();
  const auto ask = [&](const auto& body) {
    EXPECT_TRUE(link->send(seal(5, body)));
    std::optional<std::string> bytes;
    EXPECT_TRUE(eventually([&] { return (bytes = link->receive()).has_value(); }));
    return decode<Envelope>(*bytes, "answer").value().body;
  };
  const LeaseRequest of_another_model{"another", {chain.key(0)}, {}, {}}, of_nothing{"toy", {ChunkKey{}}, {}, {}},
      of_a_chunk{"toy", {chain.key(0)}, {}, {}}, of_another_shape{"toy", {chain.key(0)}, {}, {{0, 7, 0, 7}}};
  for (const LeaseRequest* const request : {&of_another_model, &of_nothing, &of_a_chunk, &of_another_shape}) {
    const LeaseAnswer answer = decode<LeaseAnswer>(ask(*request), "answer").value();
    ASSERT_EQ(answer.ranks.size(), 1u);
    EXPECT_EQ(answer.ranks[0].transport_address.empty(), request != &of_a_chunk);
    EXPECT_EQ(answer.ranks[0].pool_region.empty(), request != &of_a_chunk);
    EXPECT_GT(answer.ranks[0].chunk_bytes, 0u);
  }
  PushOffer offer{"toy", 1, shards_of(decode<LeaseAnswer>(ask(of_a_chunk), "answer")->ranks), {}};
  offer.chunks = {{chain.key(0), 8, {}}, {ChunkKey{}, 8, {}}};
  const PushAnswer granted = decode<PushAnswer>(ask(offer), "answer").value();
  ASSERT_EQ(granted.ranks.size(), 1u);
  EXPECT_FALSE(granted.ranks[0].transport_address.empty());
  EXPECT_TRUE(granted.ranks[0].pool_region.empty());
}

TEST_F(Pushes, OffersThatCantBeReadAreRefusedAtOnce) {
  TestNode decoder(controller_.endpoint(), "decode");
  const auto link = ClientSocket::connect(decoder.endpoint()).value();
  const std::uint32_t type = kMessageType<PushOffer>, newer = kNodeWire.newest + 7;
  const Envelope of_a_newer_version{newer, type, 5, encode(PushOffer{}), newer, newer, "7.7.7"};
  const Envelope malformed{kNodeWireVersion, type, 5, "no offer", kNodeWire.oldest, kNodeWire.newest, "7.7.7"};
  for (const Envelope& offer : {of_a_newer_version, malformed}) {
    ASSERT_TRUE(link->send(encode(offer)));
    std::optional<std::string> bytes;
    ASSERT_TRUE(eventually([&] { return (bytes = link->receive()).has_value(); }));
    const Envelope envelope = decode<Envelope>(*bytes, "answer").value();
    EXPECT_EQ(envelope.type, kMessageType<PushAnswer>);
    EXPECT_EQ(envelope.version, offer.version);
    EXPECT_EQ(envelope.id, 5u);
    const Result<PushAnswer> answer = decode<PushAnswer>(envelope.body, "push answer");
    ASSERT_TRUE(answer) << answer.error().what;
    EXPECT_FALSE(answer->reply.refused.empty());
    EXPECT_EQ(answer->reply.reservation, 0u);
  }
}

TEST_F(Pushes, ThatBreakOffAreOverSoonAfterTheRequestComes) {
  TestNode decoder(controller_.endpoint(), "decode");
  std::string source;
  const auto tokens = prompt(24);
  {
    TestNode prefiller(controller_.endpoint(), "prefill");
    source = prefiller.endpoint();
    NewRequest made = new_request("p", tokens);
    made.handoff = true;
    made.push_to = decoder.endpoint();
    prefiller.scheduler->add_request(made);
    ASSERT_TRUE(eventually([&] { return decoder.scheduler->metrics()["open_push_reservations"] == 1; }));
  }  // the node dies at the end of this block
  NewRequest made = new_request("d", tokens);
  made.source = HandoffSource{source, "p", 24};
  EXPECT_EQ(load(decoder, made, 8), 0u);
  EXPECT_TRUE(eventually([&] {
    decoder.step();
    return decoder.scheduler->metrics()["open_push_reservations"] == 0;
  }));
  // The slots are free again, so another node can push the prompt.
  TestNode another(controller_.endpoint(), "another");
  prefill(another, "p", tokens, 9, decoder.endpoint());
  ASSERT_TRUE(eventually([&] { return decoder.scheduler->metrics()["received_chunks_total"] == 3; }));
  EXPECT_EQ(load(decoder, new_request("e", tokens), 9), 23u);
}

class PushesOfGpus : public Pushes {
 protected:
  /// Prefills a prompt of 17 tokens, waits until the decode node has its chunks, and loads them there.
  void carry(TestNode& prefiller, TestNode& decoder, int number) {
    const auto tokens = prompt(17, 1000 * number);
    const auto received = [&] {
      prefiller.settle();
      const auto metrics = decoder.scheduler->metrics();
      return metrics.at("received_chunks_total") + metrics.at("pulled_chunks_total");
    };
    const auto before = received();
    prefill(prefiller, "p-" + std::to_string(number), tokens, 1, decoder.endpoint(), false);
    ASSERT_TRUE(eventually([&] { return received() == before + 3; }));
    EXPECT_TRUE(eventually([&] { return prefiller.scheduler->metrics()["open_pushes"] == 0; }));
    EXPECT_EQ(load(decoder, new_request("d-" + std::to_string(number), tokens), 1), 16u);
    EXPECT_EQ(decoder.scheduler->metrics()["open_push_reservations"], 0);
  }
  /// Carries prompts until one comes from frame to frame as a whole, after which the decode node is sure of frames. The
  /// first prompts go through the host pools, until the paths between the nodes are measured.
  void carry_until_sure(TestNode& prefiller, TestNode& decoder) {
    const auto num_in_frames = [&] { return decoder.scheduler->metrics()["pulled_in_frames_total"]; };
    for (int number = 0; number < 100; ++number) {
      const double before = num_in_frames();
      ASSERT_NO_FATAL_FAILURE(carry(prefiller, decoder, number));
      if (num_in_frames() == before + 3) return;
      std::this_thread::sleep_for(20ms);
    }
    FAIL() << "no prompt came from frame to frame";
  }
  std::shared_ptr<SimDevice> one_ = std::make_shared<SimDevice>(1, SimDevice::Drive::kInBackground);
  std::shared_ptr<SimDevice> other_ = std::make_shared<SimDevice>(2, SimDevice::Drive::kInBackground);
};

TEST_F(PushesOfGpus, GoFromFrameToFrameWhileThePromptIsComputed) {
  TestNode prefiller(controller_.endpoint(), "prefill", "toy", "", one_),
      decoder(controller_.endpoint(), "decode", "toy", "", other_);
  // The first chunks go through the host pools, until the paths between the nodes are measured.
  int number = 0;
  while (decoder.scheduler->metrics()["pulled_in_frames_total"] < 3 && number < 100) {
    ASSERT_NO_FATAL_FAILURE(carry(prefiller, decoder, number++));
    std::this_thread::sleep_for(20ms);
  }
  EXPECT_GE(decoder.scheduler->metrics()["pulled_in_frames_total"], 3);
  EXPECT_EQ(decoder.scheduler->metrics()["received_chunks_total"], 0);
  EXPECT_EQ(prefiller.scheduler->metrics()["announced_chunks_total"], 3 * number);
  EXPECT_EQ(prefiller.scheduler->metrics()["pushed_chunks_total"], 0);
  EXPECT_EQ(prefiller.scheduler->metrics()["push_failures_total"], 0);
}

TEST_F(PushesOfGpus, NeedNoSlotsOnceFramesWereReached) {
  TestNode prefiller(controller_.endpoint(), "prefill", "toy", "", one_),
      decoder(controller_.endpoint(), "decode", "toy", "", other_);
  const auto num_in_frames = [&] { return decoder.scheduler->metrics()["pulled_in_frames_total"]; };
  ASSERT_NO_FATAL_FAILURE(carry_until_sure(prefiller, decoder));
  const auto before = num_in_frames();
  one_->hold_copies_to_host(true);
  const auto tokens = prompt(17, 500'000);
  prefill(prefiller, "p", tokens, 2, decoder.endpoint(), false);
  const bool is_there = eventually([&] {
    prefiller.step();
    return num_in_frames() == before + 3 && prefiller.scheduler->metrics()["open_pushes"] == 0;
  });
  EXPECT_TRUE(is_there);
  EXPECT_TRUE(prefiller.scheduler->has_unreported_saves());
  EXPECT_EQ(load(decoder, new_request("d", tokens), 2), 16u);
  EXPECT_EQ(prefiller.scheduler->metrics()["push_failures_total"], 0);
  one_->hold_copies_to_host(false);
  prefiller.settle();
  EXPECT_EQ(load(prefiller, new_request("again", tokens), 2), 16u);
}

TEST_F(PushesOfGpus, MoveLayersWhileTheLaterOnesAreComputed) {
  TestNode prefiller(controller_.endpoint(), "prefill", "toy", R"(, "push_layers": 3)", one_),
      decoder(controller_.endpoint(), "decode", "toy", "", other_);
  const auto metric = [&](const char* name) { return decoder.scheduler->metrics().at(name); };
  ASSERT_NO_FATAL_FAILURE(carry_until_sure(prefiller, decoder));  // without hooks all layers move at once
  prefiller.settle();
  const double in_frames = metric("pulled_in_frames_total"), pulled = metric("pulled_chunks_total");
  const double pulls = metric("pulls_total");
  const auto tokens = prompt(17, 500'000);
  // A chunk in each of three steps. The first step may be planned before the decode node has answered the offer, and
  // its chunk is then announced when it is complete.
  before_save_ = 300ms;
  std::atomic<bool> is_computed = false;
  std::thread engine([&] {
    prefill(prefiller, "p", tokens, 2, decoder.endpoint(), true, 8);
    is_computed = true;
  });
  EXPECT_TRUE(eventually([&] { return is_computed || metric("pulls_total") == pulls + 3; }));
  EXPECT_FALSE(is_computed) << "the pull of the last chunk begins in the forward pass";
  EXPECT_LE(metric("pulled_chunks_total"), pulled + 2) << "the last chunk is not complete";
  engine.join();
  EXPECT_TRUE(eventually([&] {
    prefiller.step();
    return metric("pulled_chunks_total") == pulled + 3 && prefiller.scheduler->metrics()["open_pushes"] == 0;
  }));
  EXPECT_EQ(metric("pulls_total"), pulls + 3) << "one lease and one pull for each chunk";
  EXPECT_EQ(metric("pulled_in_frames_total"), in_frames + 3);
  EXPECT_EQ(load(decoder, new_request("d", tokens), 2), 16u);
  EXPECT_EQ(prefiller.scheduler->metrics()["push_failures_total"], 0);
}

TEST_F(PushesOfGpus, WhoseLayersComeInAnotherOrderMoveAtOnce) {
  TestNode prefiller(controller_.endpoint(), "prefill", "toy", R"(, "push_layers": 64)", one_),
      decoder(controller_.endpoint(), "decode", "toy", "", other_);
  const auto tokens = prompt(17);
  NewRequest made = new_request("p", tokens);
  made.push_to = decoder.endpoint();
  made.handoff = true;
  prefiller.scheduler->add_request(made);
  EXPECT_EQ(prefiller.lookup("p"), 0u);
  prefiller.scheduler->allocated(made.id, 0, {kSomeBlocks});
  prefiller.step({{{made.id, 0, 17, BlockTable{kSomeBlocks}}}, {}}, [&] {
    prefiller.compute(kSomeBlocks, 0, 17, 1);
    for (const std::uint32_t layer : {0, 2, 1, 1}) prefiller.worker->save_layer(layer);
  });
  EXPECT_FALSE(prefiller.worker->wants_layers());
  prefiller.scheduler->finished(made.id, 17, {kSomeBlocks}, false);
  prefiller.settle();
  EXPECT_EQ(load(prefiller, new_request("again", tokens), 1), 16u);
}

TEST_F(PushesOfGpus, GoFromSlotToSlotWhereOneNodeHasNoFrames) {
  for (const bool has_sender_frames : {true, false}) {
    const std::string none = R"(, "gpu_pool_bytes": 0)";
    TestNode prefiller(controller_.endpoint(), "prefill", "toy", has_sender_frames ? "" : none, one_),
        decoder(controller_.endpoint(), "decode", "toy", has_sender_frames ? none : "", other_);
    carry(prefiller, decoder, 7);
    EXPECT_EQ(decoder.scheduler->metrics()["received_chunks_total"], 3);
    EXPECT_EQ(prefiller.scheduler->metrics()["announced_chunks_total"], 0);
  }
}

TEST_F(PushesOfGpus, ThatNobodyPullsLeaveThePromptToItsRequest) {
  TestNode prefiller(controller_.endpoint(), "prefill", "toy", "", one_);
  const auto tokens = prompt(17);
  const auto decoder = ServerSocket::bind("tcp://127.0.0.1:*").value();
  prefill(prefiller, "p", tokens, 1, decoder->endpoint(), false);
  std::optional<ServerSocket::Message> asked;
  ASSERT_TRUE(eventually([&] { return (asked = decoder->receive()).has_value(); }));
  const Envelope envelope = decode<Envelope>(asked->bytes, "offer").value();
  EXPECT_TRUE(decode<PushOffer>(envelope.body, "offer")->has_frames);
  // An answer that wants to pull needs no address of the decode node's ranks.
  ASSERT_TRUE(decoder->send(asked->sender, seal(envelope.id, PushAnswer{{77, {}, {3, 3, 3}}, {}, {}})));
  ASSERT_TRUE(eventually([&] {
    prefiller.settle();
    return prefiller.scheduler->metrics()["announced_chunks_total"] == 3;
  }));
  std::vector<std::uint32_t> told;
  ASSERT_TRUE(eventually([&] {
    while (const auto message = decoder->receive()) {
      const Envelope settled = decode<Envelope>(message->bytes, "settlement").value();
      const auto settlement = decode<PushSettlement>(settled.body, "settlement").value();
      for (const SettledChunk& chunk : settlement.chunks) told.push_back(chunk.ok ? chunk.index : 99);
    }
    return told.size() == 3;
  }));
  std::ranges::sort(told);
  EXPECT_EQ(told, (std::vector<std::uint32_t>{0, 1, 2}));
  TestNode reader(controller_.endpoint(), "reader", "toy", "", other_);
  EXPECT_EQ(load(reader, handed_over("d", tokens, prefiller), 1), 16u);
}

/// The prefill node may still write into the slots: the worker has not revoked its grants.
TEST(PushLinksTest, ARevocationThatCantBeSentIsNotTakenForDone) {
  const SteadyClock clock;
  PeerLinks peers(clock);
  const auto server = ServerSocket::bind("tcp://127.0.0.1:*").value();
  std::vector<std::unique_ptr<ClientSocket>> workers;
  workers.push_back(ClientSocket::connect("ipc://@kvferry-test-nobody").value());
  while (workers[0]->send("an order that nobody takes")) continue;
  const std::vector<RankEndpoint> ranks(1);
  const UnreportedSaves saves;
  const std::string weights_epoch;
  int num_told = 0;
  const auto with_core = [&](const LinkParts::Event&) { ++num_told; };
  const LinkParts parts{with_core, peers, *server, workers, ranks, saves, weights_epoch, clock};
  RevokeSlots revocation{7, 0, {{0, {3, 1}, true, {5}}}};
  PushLinks(parts).execute(revocation);
  EXPECT_EQ(num_told, 0);
}

}  // namespace
}  // namespace kvferry
