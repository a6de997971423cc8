// Nodes with traffic, for tests and pictures of the status page and `kvferry top`, until stdin ends:
//   status_scene CONTROLLER      two prefill and two decode nodes that transfer KV, one that is lost, some failures
//   status_scene CONTROLLER N    N nodes that only register and report
// It prints "ready" when there is something to see.
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "controller/api/client.h"
#include "controller/api/node_report.h"
#include "tests/connector/runtime/test_node.h"

namespace kvferry {
namespace {

bool has_ended(int wait_ms) {
  pollfd input{STDIN_FILENO, POLLIN, 0};
  return ::poll(&input, 1, wait_ms) > 0;
}

void say_ready() {
  std::puts("ready");
  std::fflush(stdout);
}

/// A node without a pool, whose report is made up.
class SimulatedNode {
 public:
  SimulatedNode(const std::string& controller, int number, int num_nodes)
      : number_(number), num_nodes_(num_nodes), random_(static_cast<unsigned>(number)) {
    controller::ClientOptions options;
    options.controller = controller;
    options.node = {.engine_id = EngineId{name_of(number)},
                    .incarnation = Incarnation{1},
                    .role = number % 2 == 0 ? "kv_producer" : "kv_consumer",
                    .endpoint = endpoint_of(number),
                    .name_space = "default",
                    .fingerprint = "toy",
                    .details = {.host = fmt::format("host-{}", number / 8)}};
    client_ = value_or_throw(controller::make_client(options));
  }
  void process(TimeNs now) {
    for (const controller::ClientEvent& event : client_->process(now))
      if (std::holds_alternative<controller::SnapshotWanted>(event)) client_->end_snapshot();
    if (now < next_report_) return;
    next_report_ = now + kSecond;
    client_->set_load(random_() % 64);
    client_->set_report(encode(report()));
  }
  bool is_registered() const { return client_->registered(); }

 private:
  static std::string name_of(int number) {
    return fmt::format("{}{}", number % 2 == 0 ? "prefill" : "decode", number / 2);
  }
  static std::string endpoint_of(int number) {
    return fmt::format("tcp://10.1.{}.{}:41000", number / 250, number % 250);
  }
  double up_to(double most) { return most * static_cast<double>(random_() % 1000) / 1000; }
  controller::NodeReport report() {
    controller::NodeReport made;
    made.num_slots = 32768;
    made.num_chunks = 8000 + random_() % 24000;
    made.num_pinned = random_() % 500;
    made.chunk_bytes = 2 << 20;
    made.num_pulls = random_() % 6;
    made.tokens = 4e5;
    made.local_tokens = up_to(1e5);
    made.loaded_tokens = number_ % 2 == 0 ? up_to(1e4) : up_to(3e5);
    made.num_failures = random_() % 40;
    for (int i = 1; i <= 8; ++i) {
      made.paths.push_back({endpoint_of((number_ + 2 * i + 1) % num_nodes_), i % 3 == 0 ? "tcp" : "ucx", i % 2 == 0,
                            std::uint64_t{random_()} << 8, random_() % 3, up_to(3), 1 + up_to(20), 22});
    }
    for (std::uint64_t i = 1; i <= 2; ++i) {
      made.failures.push_back(
          {"the transfer did not end in time: the other node may be slow or frozen, or the network slow",
           endpoint_of((number_ + 1) % num_nodes_), i * 1000 * (random_() % 300)});
    }
    for (int i = 0; i < 8; ++i) made.prefixes.push_back({fmt::format("{:08x}", 0x1badcafe + 77777 * i), up_to(90)});
    return made;
  }

  int number_, num_nodes_;
  std::mt19937 random_;
  std::unique_ptr<controller::Client> client_;
  TimeNs next_report_ = 0;
};

void run_simulated(const std::string& controller, int num_nodes) {
  rlimit files{};
  ::getrlimit(RLIMIT_NOFILE, &files);
  files.rlim_cur = files.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &files);
  const SteadyClock clock;
  std::vector<std::unique_ptr<SimulatedNode>> nodes;
  for (int i = 0; i < num_nodes; ++i) nodes.push_back(std::make_unique<SimulatedNode>(controller, i, num_nodes));
  for (bool is_ready = false; !has_ended(50);) {
    for (const auto& node : nodes) node->process(clock.now());
    if (is_ready || !std::ranges::all_of(nodes, [](const auto& node) { return node->is_registered(); })) continue;
    is_ready = true;
    say_ready();
  }
}

/// Prompts of 24 tokens. There are five different first halves, of which some are more frequent.
class Prompts {
 public:
  std::vector<std::int32_t> next() {
    const int first = 1000 * static_cast<int>(std::min({random_() % 5, random_() % 5}));
    std::vector<std::int32_t> made = tokens(16, first);  // two chunks
    for (std::uint32_t i = 0; i < 8; ++i) made.push_back(static_cast<std::int32_t>(random_() % 30'000));
    return made;
  }

 private:
  std::mt19937 random_{1};
};

class Traffic {
 public:
  explicit Traffic(const std::string& controller) : controller_(controller) {
    for (const char* name : {"prefill0", "prefill1"}) prefill_.push_back(make_node(name, "kv_producer"));
    for (const char* name : {"decode0", "decode1"}) decode_.push_back(make_node(name, "kv_consumer"));
  }

  /// Sends one request through a pair of nodes.
  void run_request() {
    TestNode& from = *prefill_[num_requests_ % 2];
    TestNode& to = *decode_[num_requests_ / 2 % 2];
    const bool is_push = num_requests_ % 3 == 0;
    const std::vector<std::int32_t> prompt = prompts_.next();
    const std::string handoff = prefill(from, prompt, is_push ? to.endpoint() : "");
    if (is_push) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    decode(to, prompt, from.endpoint(), handoff);
  }
  /// Lets a decode node wait for a prefill node that has gone.
  void run_failure() {
    auto gone = make_node("prefill2", "kv_producer");
    const std::vector<std::int32_t> prompt = prompts_.next();
    const std::string endpoint = gone->endpoint(), handoff = prefill(*gone, prompt, "");
    gone.reset();
    decode(*decode_[0], prompt, endpoint, handoff);
  }

 private:
  std::unique_ptr<TestNode> make_node(const std::string& name, const std::string& role) {
    return std::make_unique<TestNode>(controller_, name, "toy", R"(, "namespace": "default")", nullptr, role);
  }
  std::string prefill(TestNode& node, const std::vector<std::int32_t>& prompt, const std::string& push_to) {
    NewRequest made = new_request(fmt::format("p{}", ++num_requests_), prompt);
    made.handoff = true;
    if (!push_to.empty()) made.push_to = push_to;
    node.scheduler->add_request(made);
    const std::uint32_t n = made.num_prompt_tokens, have = node.lookup(made.id.value);
    node.scheduler->allocated(made.id, have, {kSomeBlocks});
    node.step({{{made.id, have, n - have, BlockTable{kSomeBlocks}}}, {}},
              [&] { node.compute(kSomeBlocks, have, n, 1); });
    const FinishedRequest done = node.scheduler->finished(made.id, n, {kSomeBlocks}, false);
    node.step();
    return done.handoff_name;
  }
  void decode(TestNode& node, const std::vector<std::int32_t>& prompt, const std::string& source,
              const std::string& handoff) {
    NewRequest made = new_request(fmt::format("d{}", num_requests_), prompt);
    made.source = HandoffSource{source, handoff, made.num_prompt_tokens};
    load(node, made, 1);
    node.scheduler->finished(made.id, made.num_prompt_tokens, {kOtherBlocks}, false);
    node.step();
  }

  std::string controller_;
  std::vector<std::unique_ptr<TestNode>> prefill_, decode_;
  Prompts prompts_;
  std::uint32_t num_requests_ = 0;
};

void run_traffic(const std::string& controller) {
  const SteadyClock clock;
  SimulatedNode silent(controller, 5, 6);  // decode2, which falls silent and is lost
  Traffic traffic(controller);
  const TimeNs began = clock.now();
  for (int turn = 0; !has_ended(10); ++turn) {
    if (clock.now() < began + kSecond) silent.process(clock.now());
    if (turn == 10) traffic.run_failure();
    traffic.run_request();
    if (turn == 50) say_ready();
  }
}

}  // namespace
}  // namespace kvferry

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);  // nodes of tests check with its macros that each token is right
  if (argc == 2) kvferry::run_traffic(argv[1]);
  if (argc == 3) kvferry::run_simulated(argv[1], std::atoi(argv[2]));
  return argc == 2 || argc == 3 ? 0 : 2;
}
