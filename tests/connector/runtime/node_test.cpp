// Tests two nodes, a controller and the real transport in one process: the decode node loads what the prefill node
// computed.
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <functional>
#include <thread>

#include "connector/core/token_chain.h"
#include "connector/runtime/links/node_wire.h"
#include "connector/runtime/links/zmq_link.h"
#include "controller/api/admin_command.h"
#include "controller/api/status.h"
#include "tests/connector/runtime/test_node.h"
#include "tests/transport/base/net/ipv6.h"
#include "tests/transport/base/net/key_file.h"
#include "transport/base/net/tcp_socket.h"

namespace kvferry {
namespace {

using namespace std::chrono_literals;

/// The tries of something that happens soon on another thread: until a deadline, with a new request name for each try.
class Patience {
 public:
  bool left() { return ++tries_ > 0 && clock_.now() < deadline_; }
  std::string name() const { return "try-" + std::to_string(tries_); }
  int num_tries() const { return tries_; }

 private:
  SteadyClock clock_;
  TimeNs deadline_ = clock_.now() + 20 * kSecond;
  int tries_ = 0;
};

/// Prefills `prompt` on `node` in one step, and finishes the request.
FinishedRequest prefill(TestNode& node, const std::string& id, const std::vector<std::int32_t>& prompt, float seed) {
  NewRequest made = new_request(id, prompt);
  made.handoff = true;
  node.scheduler->add_request(made);
  const std::uint32_t n = made.num_prompt_tokens;
  EXPECT_EQ(node.lookup(id), 0u);
  node.scheduler->allocated(made.id, 0, {kSomeBlocks});
  node.step({{{made.id, 0, n, BlockTable{kSomeBlocks}}}, {}}, [&] { node.compute(kSomeBlocks, 0, n, seed); });
  return node.scheduler->finished(made.id, n, {kSomeBlocks}, false);
}

void expect_handover(const TestController& controller, const std::string& more_config = "") {
  TestNode prefiller(controller.endpoint(), "prefill", "toy", more_config),
      decoder(controller.endpoint(), "decode", "toy", more_config);
  const auto prompt = tokens(21);
  const FinishedRequest done = prefill(prefiller, "p-1", prompt, 1);
  ASSERT_TRUE(done.handoff);
  EXPECT_EQ(done.handoff_tokens, 21u);
  NewRequest made = new_request("d-1", prompt);
  made.source = HandoffSource{prefiller.endpoint(), done.handoff_name, done.handoff_tokens};
  EXPECT_EQ(prefiller.scheduler->metrics()["pool_pinned_chunks"], 3);
  EXPECT_EQ(load(decoder, made, 1), 20u);  // all tokens but the last one, which the engine computes
  EXPECT_EQ(decoder.scheduler->metrics()["pulled_chunks_total"], 3);
  const auto is_unpinned = [&] { return prefiller.scheduler->metrics()["pool_pinned_chunks"] == 0; };
  for (int i = 0; i < 2000 && !is_unpinned(); ++i) std::this_thread::sleep_for(5ms);
  EXPECT_TRUE(is_unpinned()) << "the decode node has the prompt";
}

TEST(Nodes, ADecodeNodeLoadsWhatAPrefillNodeHandedOver) { expect_handover(TestController()); }

TEST(Nodes, ADecodeNodeLoadsWhatAPrefillNodeHandedOverOverIpv6) {
  SKIP_WITHOUT_IPV6();
  expect_handover(TestController("tcp://[::1]:0"));
}

TEST(Nodes, TellOnWhichHostTheyRun) {
  const TestController controller;
  const TestNode node(controller.endpoint(), "a");
  std::string name(256, '\0');
  ASSERT_EQ(::gethostname(name.data(), name.size()), 0);
  const controller::Status status = value_or_throw(controller::fetch_status(controller.endpoint(), 10'000));
  ASSERT_EQ(status.nodes.size(), 1u);
  EXPECT_EQ(status.nodes[0].details.host, name.c_str());
}

/// A cluster key in a file of the test.
class KeyFile {
 public:
  KeyFile() {
    std::ofstream(path_) << std::string(64, 'k');
    ::chmod(path_.c_str(), 0600);
  }
  ~KeyFile() { std::remove(path_.c_str()); }
  const std::string& path() const { return path_; }
  std::string setting() const { return R"(, "cluster_key_file": ")" + path_ + "\""; }

 private:
  std::string path_ = ::testing::TempDir() + fmt::format("node-test-{}.key", ::getpid());
};

TEST(Nodes, MembersHandOverWithAClusterKey) {
  const KeyFile key;
  expect_handover(TestController("tcp://127.0.0.1:0", key.path()), key.setting());
}

/// Counts handovers from `prefiller` to `decoder`, until `reached`; all KV must be right. A handover is not counted if
/// a message was lost with its connection: then the KV is computed.
void hand_over_until(TestNode& prefiller, TestNode& decoder, const std::function<bool()>& reached,
                     int& num_handed_over) {
  static int num_prompts = 0;
  EXPECT_TRUE(net::reaches([&] {
    const std::string id = std::to_string(++num_prompts);
    const auto prompt = tokens(21, 1000 * num_prompts);
    const auto seed = static_cast<float>(num_prompts % 7);
    const FinishedRequest done = prefill(prefiller, "p-" + id, prompt, seed);
    NewRequest made = new_request("d-" + id, prompt);
    made.source = HandoffSource{prefiller.endpoint(), done.handoff_name, done.handoff_tokens};
    if (load(decoder, made, seed) == 20u) ++num_handed_over;
    decoder.scheduler->finished(made.id, 20, {kOtherBlocks}, false);
    std::this_thread::sleep_for(20ms);
    return reached();
  }));
}

TEST(Nodes, HandOverWhileTheClusterKeyIsReplacedAndTheFormerIsRefusedAfterwards) {
  using net::kRotation;
  net::KeyFile of_controller(::testing::TempDir(), kRotation[0]), of_prefiller(::testing::TempDir(), kRotation[0]),
      of_decoder(::testing::TempDir(), kRotation[0]);
  const TestController controller("tcp://127.0.0.1:0", of_controller.path());
  const auto config = [](const net::KeyFile& file) {
    // The latter pool_bytes counts: a handover that nobody fetches stays in the pool for a minute.
    return R"(, "path": "tcp", "pool_bytes": "4MiB", "cluster_key_file": ")" + file.path() + "\"";
  };
  TestNode prefiller(controller.endpoint(), "prefill", "toy", config(of_prefiller)),
      decoder(controller.endpoint(), "decode", "toy", config(of_decoder));
  int num_handed_over = 0;
  for (std::size_t step = 1; step < kRotation.size(); ++step) {
    // Each host gets the file at another time, and others use the former one meanwhile.
    for (net::KeyFile* const file : {&of_decoder, &of_controller, &of_prefiller}) {
      file->write(kRotation[step]);
      const SteadyClock clock;
      const TimeNs until = clock.now() + 4 * net::ClusterKey::kLookEveryNs;
      const int num_before = num_handed_over;
      hand_over_until(
          prefiller, decoder, [&] { return clock.now() > until && num_handed_over > num_before; }, num_handed_over);
    }
  }
  const auto ask = [&](const std::string& key) {
    return controller::fetch_status(controller.endpoint(), 300, net::ClusterKey(key));
  };
  EXPECT_TRUE(net::reaches([&] { return !ask(net::kOldKey); })) << "the former key is still accepted";
  EXPECT_TRUE(net::reaches([&] {
    const auto status = ask(net::kNewKey);
    return status && status->nodes.size() == 2;
  }));
}

TEST(Nodes, AnUnknownPeersRequestToAMemberHasNoAnswer) {
  const KeyFile key;
  const TestController open, closed("tcp://127.0.0.1:0", key.path());
  for (const bool has_key : {false, true}) {
    const TestNode node(has_key ? closed.endpoint() : open.endpoint(), "a", "toy", has_key ? key.setting() : "");
    const auto unknown_peer = ClientSocket::connect(node.endpoint()).value();
    ASSERT_TRUE(unknown_peer->send(seal(7, LeaseRequest{})));
    std::optional<std::string> answer;
    const SteadyClock clock;
    const TimeNs deadline = clock.now() + (has_key ? 300 * kMillisecond : 20 * kSecond);
    while (!answer && clock.now() < deadline) {
      std::this_thread::sleep_for(2ms);
      answer = unknown_peer->receive();
    }
    EXPECT_EQ(answer.has_value(), !has_key);
  }
}

TEST(Nodes, WithoutAKeyANodeListensBeyondLoopbackOnlyIfItIsInsecure) {
  const std::vector<std::string> own = net::interface_addresses();
  if (own.empty()) GTEST_SKIP() << "this host has no address but loopback";
  const std::string there = R"(, "advertise_host": ")" + own[0] + "\"";
  const TestController controller;
  try {
    const TestNode node(controller.endpoint(), "a", "toy", there);
    FAIL() << "started without a key at " << own[0];
  } catch (const std::exception& error) {
    EXPECT_NE(std::string(error.what()).find("there is no cluster key, and other hosts could reach"), std::string::npos)
        << error.what();
  }
  const TestNode insecure(controller.endpoint(), "b", "toy", there + R"(, "insecure": true)");
  const KeyFile key;
  const TestController closed("tcp://127.0.0.1:0", key.path());
  const TestNode member(closed.endpoint(), "c", "toy", there + key.setting());
}

TEST(Nodes, ANodeWithoutTheControllersKeySaysSo) {
  const KeyFile key;
  const TestController controller("tcp://127.0.0.1:0", key.path());
  try {
    const TestNode node(controller.endpoint(), "a");
    FAIL() << "registered without the key";
  } catch (const std::exception& error) {
    EXPECT_NE(
        std::string(error.what()).find("this process has no cluster key: if the controller has one, set the same"),
        std::string::npos)
        << error.what();
  }
}

TEST(Nodes, TheControllerLeadsToAHolderWhenNobodyNamedIt) {
  TestController controller;
  TestNode holder(controller.endpoint(), "holder"), asker(controller.endpoint(), "asker");
  prefill(holder, "p-1", tokens(26), 2);
  // The publication may need several messages. A request that comes too early finds fewer chunks.
  auto longer = tokens(26);
  longer.push_back(7);
  std::uint32_t external = 0;
  for (Patience patience; patience.left() && external < 24;)
    external = load(asker, new_request(patience.name(), longer), 2);
  EXPECT_EQ(external, 24u);  // three full chunks; a tail of 2 tokens has no group, so it is not found
}

TEST(Nodes, APreemptedRequestLoadsItsMissingTailAndNothingElse) {
  TestController controller;
  TestNode node(controller.endpoint(), "both");
  auto prompt = tokens(10);
  node.scheduler->add_request(new_request("r", prompt));
  EXPECT_EQ(node.lookup("r"), 0u);
  node.scheduler->allocated(RequestId{"r"}, 0, {kSomeBlocks});
  node.step({{{RequestId{"r"}, 0, 10, BlockTable{kSomeBlocks}}}, {}}, [&] { node.compute(kSomeBlocks, 0, 10, 3); });
  for (std::uint32_t t = 10; t < 19; ++t) {
    node.scheduler->update_tokens(RequestId{"r"}, t, std::vector<std::int32_t>{static_cast<std::int32_t>(t)});
    node.step({{{RequestId{"r"}, t, 1, std::nullopt}}, {}}, [&] { node.compute(kSomeBlocks, t, t + 1, 3); });
  }
  node.scheduler->update_tokens(RequestId{"r"}, 19, std::vector<std::int32_t>{19});
  node.step({{}, {RequestId{"r"}}}, [&] { node.wipe(); });  // other requests take the blocks in the same step
  ASSERT_EQ(node.lookup("r", 8), 11u);  // 19 of 20 tokens were computed, and 8 of these are still in the engine's cache
  node.scheduler->allocated(RequestId{"r"}, 11, {kOtherBlocks});
  node.step({{{RequestId{"r"}, 19, 1, BlockTable{kOtherBlocks}}}, {}}, [&] {
    EXPECT_EQ(node.wrong_tokens(kOtherBlocks, 8, 19, 3), 0u);
    // These tokens were not requested, so they were not written.
    EXPECT_EQ(node.wrong_tokens(kOtherBlocks, 0, 8, 3), 8u);
  });
  const FinishedRequest done = node.scheduler->finished(RequestId{"r"}, 20, {kOtherBlocks}, false);
  ASSERT_EQ(done.admissions.size(), 2u);
  EXPECT_TRUE(done.admissions[1].resumed);
  EXPECT_EQ(done.admissions[1].to_load, 11u);
  EXPECT_EQ(done.admissions[1].loaded, 11u);
}

TEST(Nodes, AHolderThatDiedCostsATimeoutNotARequest) {
  TestController controller;
  auto holder = std::make_unique<TestNode>(controller.endpoint(), "holder");
  TestNode asker(controller.endpoint(), "asker");
  const auto prompt = tokens(16);
  const FinishedRequest done = prefill(*holder, "p-1", prompt, 4);
  NewRequest made = new_request("a", prompt);
  made.source = HandoffSource{"tcp://" + holder->scheduler->host() + ":" + std::to_string(holder->scheduler->port()),
                              done.handoff_name, done.handoff_tokens};
  holder.reset();
  EXPECT_EQ(load(asker, made, 4), 0u);
}

TEST(Nodes, PeersThatAskWithoutABreakKeepANodeFromNothing) {
  const TestController controller;
  TestNode prefiller(controller.endpoint(), "prefill"), decoder(controller.endpoint(), "decode");
  const auto prompt = tokens(21);
  const FinishedRequest done = prefill(prefiller, "p", prompt, 1);
  std::atomic<bool> is_over = false;
  std::vector<std::thread> liars;
  for (int i = 0; i < 2; ++i)
    liars.emplace_back([&] {
      const auto link = ClientSocket::connect(decoder.endpoint()).value();
      const std::string question = seal(1, LivesRequest{"nobody"});
      while (!is_over)
        for (int left = 100; left > 0 && (link->send(question) || link->receive()); --left) continue;
    });
  std::this_thread::sleep_for(300ms);
  NewRequest made = new_request("d", prompt);
  made.source = HandoffSource{prefiller.endpoint(), done.handoff_name, done.handoff_tokens};
  EXPECT_EQ(load(decoder, made, 1), 20u);
  is_over = true;
  for (std::thread& liar : liars) liar.join();
}

TEST(Nodes, RequestsGoOnWithoutTheControllerAndUseItAgain) {
  auto controller = std::make_unique<TestController>();
  const std::string endpoint = controller->endpoint();
  TestNode holder(endpoint, "holder"), asker(endpoint, "asker");
  prefill(holder, "p-1", tokens(16), 5);
  controller.reset();
  EXPECT_EQ(load(asker, new_request("without", tokens(16, 5000)), 5), 0u);
  controller = std::make_unique<TestController>(endpoint);
  // The holder reports its chunks to the new controller without being restarted.
  std::uint32_t external = 0;
  for (Patience patience; patience.left() && external < 15;)
    external = load(asker, new_request(patience.name(), tokens(16)), 5);
  EXPECT_EQ(external, 15u);
}

TEST(Nodes, ADrainedNodesChunksAreOnAnotherBeforeItGoes) {
  TestController controller;
  TestNode leaving(controller.endpoint(), "leaving"), other(controller.endpoint(), "other");
  prefill(leaving, "p-1", tokens(26), 2);
  leaving.step({}, [] {});
  const auto node = [&](const std::string& name) {
    const controller::Status all = controller::fetch_status(controller.endpoint(), 2000).value();
    for (const controller::NodeStatus& status : all.nodes)
      if (status.engine_id == EngineId{name}) return status;
    return controller::NodeStatus{};
  };
  for (Patience patience; node("leaving").num_chunks < 4 && patience.left();) std::this_thread::sleep_for(20ms);
  ASSERT_EQ(node("leaving").num_chunks, 4u);
  const controller::AdminCommand rule{.verb = "drain", .name_space = "default", .engine_id = "leaving"};
  ASSERT_TRUE(controller::run_admin_command(controller.endpoint(), rule, 2000));
  for (Patience patience; !node("leaving").is_drained && patience.left();) std::this_thread::sleep_for(20ms);
  EXPECT_EQ(node("leaving").num_replicated, 4u);
  EXPECT_EQ(node("other").num_chunks, 4u);
  leaving.scheduler->shutdown();
  EXPECT_EQ(load(other, new_request("d-1", tokens(26)), 2), 24u);  // a tail of two tokens is too short to be found
}

TEST(Nodes, APinnedPrefixOutlivesAFloodAndAClearedPoolIsEmpty) {
  TestController controller;
  TestNode node(controller.endpoint(), "node");
  prefill(node, "p-1", tokens(16), 2);
  node.step({}, [] {});
  const auto metric = [&](const std::string& name) { return node.scheduler->metrics()[name]; };
  TokenChain chain(root_key("toy", ""), 8, {});
  chain.append(tokens(16));
  const std::vector<ChunkKey> keys(chain.keys().begin(), chain.keys().end());
  const controller::AdminCommand pin{
      .verb = "pin", .name_space = "default", .owner = "ops", .keys = keys, .ttl_ms = 60'000};
  std::string last;
  for (Patience patience; metric("pool_controller_pinned_chunks") < 2 && patience.left();) {
    const auto done = controller::run_admin_command(controller.endpoint(), pin, 2000);
    ASSERT_TRUE(done) << done.error().what;
    last = done->text;
    std::this_thread::sleep_for(50ms);
  }
  EXPECT_GE(metric("pool_controller_pinned_chunks"), 2) << last;
  const controller::AdminCommand clear{.verb = "clear", .name_space = "default"};
  const auto done = controller::run_admin_command(controller.endpoint(), clear, 2000);
  ASSERT_TRUE(done) << done.error().what;
  for (Patience patience; metric("pool_chunks") > 0 && patience.left();) std::this_thread::sleep_for(20ms);
  EXPECT_EQ(metric("pool_chunks"), 0);
}

TEST(Nodes, DropWhatAPurgedNodeGaveAndTakeNothingMoreFromIt) {
  TestController controller;
  TestNode prefiller(controller.endpoint(), "prefill"), decoder(controller.endpoint(), "decode");
  const auto metric = [&](const std::string& name) { return decoder.scheduler->metrics()[name]; };
  const auto prompt = tokens(21);
  const auto hand_over = [&](const std::string& name) {
    const FinishedRequest done = prefill(prefiller, "p-" + name, prompt, 1);
    NewRequest made = new_request("d-" + name, prompt);
    made.source = HandoffSource{prefiller.endpoint(), done.handoff_name, done.handoff_tokens};
    return load(decoder, made, 1);
  };
  EXPECT_EQ(hand_over("1"), 20u);
  const controller::AdminCommand purge{.verb = "purge", .name_space = "default", .engine_id = "prefill"};
  const auto done = controller::run_admin_command(controller.endpoint(), purge, 2000);
  ASSERT_TRUE(done) << done.error().what;
  for (Patience patience; metric("pool_chunks") > 0 && patience.left();) std::this_thread::sleep_for(20ms);
  EXPECT_EQ(metric("pool_chunks"), 0);
  EXPECT_EQ(metric("purged_chunks_total"), 3);
  EXPECT_EQ(hand_over("2"), 0u);
  EXPECT_EQ(decoder.scheduler->num_engine_purges(), 1u);
  const auto has_told = [&] {
    const auto status = controller::fetch_status(controller.endpoint(), 2000);
    return status && std::ranges::all_of(status->nodes, [&](const controller::NodeStatus& node) {
             return node.report && node.report->purge_id == done->number && node.report->purged_bytes > 0;
           });
  };
  for (Patience patience; !has_told() && patience.left();) std::this_thread::sleep_for(50ms);
  EXPECT_TRUE(has_told());
}

TEST(Nodes, ReportTheWeightsEpochOfTheirEngine) {
  TestController controller;
  TestNode node(controller.endpoint(), "a");
  node.scheduler->set_weights_epoch("3@blue");
  const auto has_told = [&] {
    const auto status = controller::fetch_status(controller.endpoint(), 2000);
    return status && status->nodes.size() == 1 && status->nodes[0].report &&
           status->nodes[0].report->weights_epoch == "3@blue";
  };
  for (Patience patience; !has_told() && patience.left();) std::this_thread::sleep_for(50ms);
  EXPECT_TRUE(has_told());
}

/// Runs with all sizes of the GPU's pool, and requires landings although the transport can't reach the GPU's memory.
class NodesWithGpus : public ::testing::TestWithParam<const char*> {};

TEST_P(NodesWithGpus, ADecodeNodeLoadsWhatAPrefillNodeHandedOver) {
  const auto one = std::make_shared<SimDevice>(1, SimDevice::Drive::kInBackground);
  const auto other = std::make_shared<SimDevice>(2, SimDevice::Drive::kInBackground);
  {
    TestController controller;
    TestNode prefiller(controller.endpoint(), "prefill", "toy", GetParam(), one),
        decoder(controller.endpoint(), "decode", "toy", GetParam(), other);
    EXPECT_NE(prefiller.worker->describe().find("GPU tier: "), std::string::npos);
    EXPECT_EQ(one->history().front(), "pin") << "the GPU must know the pool before a transport does";
    const auto prompt = tokens(21);
    const FinishedRequest done = prefill(prefiller, "p-1", prompt, 1);
    prefiller.wipe();  // other requests get the blocks at once
    ASSERT_EQ(done.handoff_tokens, 21u);
    // The decode node asks before the prefill node's engine runs another step.
    std::thread steps([&] {
      std::this_thread::sleep_for(20ms);
      prefiller.settle();
    });
    NewRequest made = new_request("d-1", prompt);
    made.source =
        HandoffSource{"tcp://" + prefiller.scheduler->host() + ":" + std::to_string(prefiller.scheduler->port()),
                      done.handoff_name, done.handoff_tokens};
    EXPECT_EQ(load(decoder, made, 1), 20u);
    steps.join();
    // The chunks come from the node's own frames or slots. The tail is too short to be found.
    EXPECT_EQ(load(prefiller, new_request("p-2", prompt), 1), 16u);
    EXPECT_FALSE(prefiller.scheduler->has_unreported_saves());
  }
  EXPECT_EQ(one->num_alive() + other->num_alive(), 0u);
}
INSTANTIATE_TEST_SUITE_P(All, NodesWithGpus,
                         ::testing::Values("", R"(, "gpu_pool_bytes": 0)", R"(, "gpu_pool_bytes": "4KiB")",
                                           R"(, "gpu_pool_bytes": "64KiB")",
                                           R"(, "gpu_pool_bytes": "64KiB", "lands_in_gpu": false)"));

TEST(NodesWithFrames, PullFromGpuToGpuByDefaultAndTellIt) {
  const auto one = std::make_shared<SimDevice>(1, SimDevice::Drive::kInBackground);
  const auto other = std::make_shared<SimDevice>(2, SimDevice::Drive::kInBackground);
  TestController controller;
  TestNode prefiller(controller.endpoint(), "prefill", "toy", "", one),
      decoder(controller.endpoint(), "decode", "toy", "", other);
  EXPECT_NE(decoder.worker->describe().find("frames of"), std::string::npos);
  EXPECT_NE(decoder.worker->describe().find("the default of gpu_pool_bytes"), std::string::npos);
  const auto metric = [&](const std::string& name) { return decoder.scheduler->metrics()[name]; };
  // The first pulls go through the host pools, until the paths between the nodes are measured.
  for (Patience patience; metric("pulled_in_frames_total") < 2 && patience.left();) {
    const auto prompt = tokens(17, 1000 * patience.num_tries());
    const FinishedRequest done = prefill(prefiller, "p-" + patience.name(), prompt, 1);
    prefiller.settle();
    NewRequest made = new_request("d-" + patience.name(), prompt);
    made.source = HandoffSource{prefiller.endpoint(), done.handoff_name, done.handoff_tokens};
    EXPECT_EQ(load(decoder, made, 1), 16u);
    std::this_thread::sleep_for(20ms);
  }
  EXPECT_GE(metric("pulled_in_frames_total"), 2);
  // From now on the decode node needs no slots of the prefill node.
  const auto before = metric("pulled_in_frames_total");
  one->hold_copies_to_host(true);
  const auto prompt = tokens(17, 900'000);
  const auto saved = [&] { return prefiller.scheduler->metrics()["saved_chunks_total"]; };
  const auto saved_before = saved();
  const FinishedRequest done = prefill(prefiller, "in frames", prompt, 1);
  for (Patience patience; saved() < saved_before + 3 && patience.left();) prefiller.step();
  NewRequest made = new_request("reader", prompt);
  made.source = HandoffSource{prefiller.endpoint(), done.handoff_name, done.handoff_tokens};
  EXPECT_EQ(load(decoder, made, 1), 16u);
  EXPECT_EQ(metric("pulled_in_frames_total"), before + 2);
  EXPECT_TRUE(prefiller.scheduler->has_unreported_saves());
  one->hold_copies_to_host(false);
  prefiller.settle();
}

TEST(Nodes, AnotherModelInTheSameNamespaceIsRefusedAtStart) {
  TestController controller;
  TestNode first(controller.endpoint(), "first", "model-a");
  try {
    TestNode second(controller.endpoint(), "second", "model-b");
    FAIL() << "two models in one namespace";
  } catch (const std::runtime_error& refusal) {
    EXPECT_NE(std::string(refusal.what()).find("model-a"), std::string::npos) << refusal.what();
    EXPECT_NE(std::string(refusal.what()).find("model-b"), std::string::npos) << refusal.what();
  }
  TestNode third(controller.endpoint(), "third", "model-b", R"(, "namespace": "other")");
}

TEST(Nodes, AControllerThatIsNotThereIsOneSentence) {
  try {
    TestNode node("tcp://127.0.0.1:1", "lonely");
    FAIL() << "started without a controller";
  } catch (const std::runtime_error& failure) {
    EXPECT_NE(std::string(failure.what()).find("tcp://127.0.0.1:1"), std::string::npos) << failure.what();
  }
}

}  // namespace
}  // namespace kvferry
