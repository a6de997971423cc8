#include "tests/gpu/bench/bench_node.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <utility>

#include "tests/gpu/bench/bench_tools.h"
#include "transport/base/net/host_port.h"

namespace kvferry {

BenchController::BenchController() {
  controller::ServerOptions options;
  options.bind = "tcp://127.0.0.1:0";
  server_ = must(controller::Server::bind(options, clock_));
  thread_ = std::thread([this] { server_->run(); });
}

BenchController::~BenchController() {
  server_->stop();
  thread_.join();
}

BenchNode::BenchNode(std::uint32_t num_tokens_max) {
  const std::uint32_t num_blocks = num_tokens_max / PatternCache::kBlockTokens + 1;  // block 0 is vLLM's null block
  gpu_ = must(open_gpu(0));
  cache_ = std::make_unique<PatternCache>(*gpu_.device, num_blocks);
  stream_ = must(gpu_.device->make_stream());
  blocks_ = shuffled(1, static_cast<BlockId>(num_blocks), 3);
}

Result<std::unique_ptr<BenchNode>> BenchNode::start(const std::string& controller, const std::string& engine_id,
                                                    const std::string& settings, std::uint32_t num_tokens_max) {
  std::unique_ptr<BenchNode> node(new BenchNode(num_tokens_max));
  SchedulerOptions options;
  options.config = KVFERRY_TRY(
      load_config(fmt::format(R"({{"chunk_tokens": {}, "controller": "{}"{}}})", kChunkTokens, controller, settings),
                  [](const char*) { return nullptr; }));
  options.engine_id = EngineId{engine_id};
  options.role = "kv_both";
  options.fingerprint = "llama-3.1-8b";
  options.groups = {{PatternCache::kBlockTokens}};
  options.runs_ahead = true;  // as vLLM does: loads are asynchronous
  node->scheduler_ = KVFERRY_TRY(SchedulerNode::start(options));
  WorkerOptions worker{options.config, 0, engine_id, {node->cache_->layout()}};
  worker.gpu = node->gpu_;
  node->worker_ = KVFERRY_TRY(WorkerNode::start(std::move(worker)));
  KVFERRY_TRY(node->scheduler_->attach_workers({node->worker_->handshake()}));
  return node;
}

BenchNode::~BenchNode() {
  if (scheduler_) scheduler_->shutdown();
  if (worker_) worker_->shutdown();
  worker_.reset();
  gpu_.device->drop_stream(stream_);
}

TimeNs BenchNode::step(const StepInput& input, double* load_ms, int layer_ms) {
  must(worker_->begin_step(scheduler_->build_step(input), stream_));
  const double ms = host_ms([&] { worker_->load(stream_); });
  if (load_ms != nullptr) *load_ms = ms;
  for (std::uint32_t layer = 0; layer_ms > 0 && layer < PatternCache::kLayers; ++layer) {
    std::this_thread::sleep_for(std::chrono::milliseconds(layer_ms));
    worker_->save_layer(layer, stream_);
  }
  const TimeNs forward_ended = SteadyClock().now();
  worker_->save(stream_);
  if (const auto report = worker_->take_report()) must(scheduler_->worker_report(*report));
  return forward_ended;
}

std::uint32_t BenchNode::lookup(const RequestId& id, bool& is_async) {
  const SteadyClock clock;
  for (const TimeNs deadline = clock.now() + 20 * kSecond; clock.now() < deadline;) {
    const Answer answer = scheduler_->lookup(id, 0);
    is_async = answer.is_async;
    if (!answer.pending) return answer.num_external;
    step({});
  }
  KVFERRY_CHECK(false, "the lookup of {} stayed unanswered", id.value);
  return 0;
}

std::string BenchNode::endpoint() const { return "tcp://" + net::to_text({scheduler_->host(), scheduler_->port()}); }

std::uint32_t BenchNode::wait_for_pulled(std::uint32_t count) {
  const SteadyClock clock;
  const auto now = [&](const char* name) { return scheduler_->metrics().at(name); };
  for (const TimeNs deadline = clock.now() + 10 * kSecond;
       clock.now() < deadline && now("pulled_chunks_total") < pulled_ + count;)
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  pulled_ = now("pulled_chunks_total");
  return static_cast<std::uint32_t>(now("pulled_in_frames_total") -
                                    std::exchange(pulled_in_frames_, now("pulled_in_frames_total")));
}

BenchNode::Prefilled BenchNode::prefill(std::uint64_t prompt, std::uint32_t num_tokens, const std::string& push_to,
                                        int layer_ms) {
  tokens_.resize(num_tokens);
  std::iota(tokens_.begin(), tokens_.end(), static_cast<std::int32_t>(prompt * num_tokens));
  cache_->write(blocks_, num_tokens, prompt);
  NewRequest made;
  made.id = RequestId{fmt::format("prefill-{}", prompt)};
  made.tokens = tokens_;
  made.num_prompt_tokens = num_tokens;
  made.handoff = true;
  if (!push_to.empty()) made.push_to = push_to;
  scheduler_->add_request(made);
  bool is_async = false;
  lookup(made.id, is_async);
  scheduler_->allocated(made.id, 0, {blocks_});
  FinishedRequest done;
  Prefilled result;
  result.forward_ended = step({{{made.id, 0, num_tokens, BlockTable{blocks_}}}, {}}, nullptr, layer_ms);
  done = scheduler_->finished(made.id, num_tokens, {blocks_}, false);
  while (scheduler_->has_unreported_saves()) step({});
  result.saved_ms = static_cast<double>(SteadyClock().now() - result.forward_ended) / 1e6;
  KVFERRY_CHECK(done.handoff, "the prompt was not handed over");
  result.endpoint = endpoint();
  result.handoff = done.handoff_name;
  result.num_tokens = done.handoff_tokens;
  return result;
}

BenchNode::Loaded BenchNode::load(std::uint64_t prompt, std::uint32_t num_tokens, const Prefilled& from) {
  tokens_.resize(num_tokens);
  std::iota(tokens_.begin(), tokens_.end(), static_cast<std::int32_t>(prompt * num_tokens));
  NewRequest made;
  made.id = RequestId{fmt::format("decode-{}", prompt)};
  made.tokens = tokens_;
  made.num_prompt_tokens = num_tokens;
  made.source = HandoffSource{from.endpoint, from.handoff, from.num_tokens};
  cache_->write({}, 0, 0);
  Loaded loaded;
  loaded.total_ms = host_ms([&] {
    bool is_async = false;
    loaded.lookup_ms = host_ms([&] {
      scheduler_->add_request(made);
      loaded.num_tokens = lookup(made.id, is_async);
    });
    scheduler_->allocated(made.id, loaded.num_tokens, {blocks_});
    StepInput input;
    if (!is_async) input.scheduled = {{made.id, loaded.num_tokens, 1, BlockTable{blocks_}}};
    step(input, &loaded.load_ms);
    const bool waits = is_async && loaded.num_tokens > 0;
    while (waits && worker_->take_finished_loads().empty()) step({});
    must(must(DeviceEvent::record(*gpu_.device, stream_)).wait());
  });
  if (!worker_->take_failed_blocks().empty()) loaded.num_tokens = 0;
  loaded.num_wrong = cache_->count_wrong(blocks_, loaded.num_tokens, prompt);
  scheduler_->finished(made.id, loaded.num_tokens, {blocks_}, false);
  while (scheduler_->has_unreported_saves()) step({});
  const auto [seen, lives] = scheduler_->transfers_after(events_seen_);
  events_seen_ = seen;
  for (const RequestLife& life : lives)
    for (const LifeEvent& event : life.events)
      if (event.what() == LifeKind::kPulled) loaded.pulled = event;
  return loaded;
}

}  // namespace kvferry
