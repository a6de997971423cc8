#include "tests/connector/runtime/shaped_node.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <numeric>
#include <stdexcept>

#include "tests/connector/runtime/or_throw.h"
#include "tests/connector/runtime/test_node.h"

namespace kvferry {

std::string NodeShape::name() const {
  std::string layers;
  for (const std::uint32_t stage : stages) layers += (layers.empty() ? "" : "+") + std::to_string(stage);
  return fmt::format("tp {} of {} heads, {} layers, {}blocks of {}, {}", tp, heads, layers,
                     planes == 1 ? "latent, " : "", block_tokens, heads_first ? "HND" : "NHD");
}

ShapedNode::ShapedNode(const std::string& controller, const std::string& engine_id, NodeShape shape)
    : shape_(std::move(shape)), blocks_(kNumBlocks - 1) {
  std::iota(blocks_.rbegin(), blocks_.rend(), 1);
  SchedulerOptions options;
  options.config = value_or_throw(load_config(
      fmt::format(R"({{"chunk_tokens": {}, "pool_bytes": "64KiB", "load_timeout_ms": 3000, "controller": "{}"}})",
                  kChunkTokens, controller),
      [](const char*) { return nullptr; }));
  options.engine_id = EngineId{engine_id};
  options.role = "kv_both";
  options.fingerprint = "toy";
  options.groups = {{shape_.block_tokens}};
  options.start_timeout_ms = 2000;
  scheduler = value_or_throw(SchedulerNode::start(options));
  endpoint_ = fmt::format("tcp://{}:{}", scheduler->host(), scheduler->port());
  std::uint32_t first_layer = 0;
  for (const std::uint32_t layers : shape_.stages) {
    for (std::uint32_t rank = 0; rank < shape_.tp; ++rank)
      ranks_.push_back({shard_of(first_layer, layers, shape_.heads, rank, shape_.tp), {}});
    first_layer += layers;
  }
  std::vector<std::string> hellos;
  for (std::uint32_t number = 0; number < ranks_.size(); ++number) {
    Rank& rank = ranks_[number];
    rank.memory.assign(rank.shard.num_cells() * kNumBlocks * shape_.planes * shape_.block_tokens * kDim, -1.0F);
    KvLayout layout;
    layout.num_kv_heads = rank.shard.num_heads;
    layout.head_dim = kDim;
    layout.element_bytes = sizeof(float);
    layout.planes = shape_.planes;
    layout.block_tokens = shape_.block_tokens;
    layout.num_blocks = kNumBlocks;
    for (std::uint32_t layer = 0; layer < rank.shard.num_layers; ++layer) {
      const auto plane = [&](std::uint32_t which) {
        const std::size_t base = cell(rank, 0, 0, layer, which, 0, 0);
        const auto stride = [&](std::uint32_t block, std::uint32_t row, std::uint32_t head, std::uint32_t dim) {
          return static_cast<std::int64_t>((cell(rank, block, row, layer, which, head, dim) - base) * sizeof(float));
        };
        return PlaneLayout{reinterpret_cast<std::uint64_t>(&rank.memory[base]), stride(1, 0, 0, 0), stride(0, 0, 1, 0),
                           stride(0, 1, 0, 0), stride(0, 0, 0, 1)};
      };
      layout.layers.push_back({"layer" + std::to_string(layer), 0, plane(0), plane(shape_.planes - 1)});
    }
    workers.push_back(value_or_throw(WorkerNode::start({options.config, number, engine_id, {layout}, rank.shard})));
    hellos.push_back(workers.back()->handshake());
    segments_.push_back(fmt::format("{}.{}", engine_id, number));
  }
  ok_or_throw(scheduler->attach_workers(hellos));
}

ShapedNode::~ShapedNode() {
  if (scheduler) scheduler->shutdown();
  for (auto& worker : workers)
    if (worker) worker->shutdown();
}

std::size_t ShapedNode::cell(const Rank& rank, std::uint32_t block, std::uint32_t row, std::uint32_t layer,
                             std::uint32_t plane, std::uint32_t head, std::uint32_t dim) const {
  const std::uint32_t heads = rank.shard.num_heads, rows = shape_.block_tokens;
  const std::size_t page = ((std::size_t{layer} * kNumBlocks + block) * shape_.planes + plane) * heads * rows;
  const std::size_t within = shape_.heads_first ? std::size_t{head} * rows + row : std::size_t{row} * heads + head;
  return (page + within) * kDim + dim;
}

template <class What>
void ShapedNode::each(std::uint32_t num_tokens, float seed, What what) {
  for (Rank& rank : ranks_) {
    const Shard& shard = rank.shard;
    for (std::uint32_t t = 0; t < num_tokens; ++t)
      for (std::uint32_t layer = 0; layer < shard.num_layers; ++layer)
        for (std::uint32_t head = 0; head < shard.num_heads; ++head)
          for (std::uint32_t plane = 0; plane < shape_.planes; ++plane)
            for (std::uint32_t dim = 0; dim < kDim; ++dim) {
              const auto block = static_cast<std::uint32_t>(blocks_[t / shape_.block_tokens]);
              const std::uint32_t where =
                  (shard.first_layer + layer) * 1000 + (shard.first_head + head) * 100 + plane * 50 + dim;
              what(rank.memory[cell(rank, block, t % shape_.block_tokens, layer, plane, head, dim)],
                   seed * 1e6F + static_cast<float>(t) * 1e4F + static_cast<float>(where));
            }
  }
}

void ShapedNode::step(const StepInput& input) {
  const std::string plan = scheduler->build_step(input);
  for (auto& worker : workers)
    if (worker) ok_or_throw(worker->begin_step(plan));
  for (auto& worker : workers)
    if (worker) worker->load();
  for (auto& worker : workers) {
    if (!worker) continue;
    worker->save();
    if (const auto report = worker->take_report()) ok_or_throw(scheduler->worker_report(*report));
  }
}

HandoffSource ShapedNode::prefill(const std::string& id, const std::vector<std::int32_t>& prompt, float seed) {
  NewRequest made = new_request(id, prompt);
  made.handoff = true;
  scheduler->add_request(made);
  answered_lookup(*scheduler, made.id, 0, [this] { step(); });
  scheduler->allocated(made.id, 0, {blocks_});
  each(made.num_prompt_tokens, seed, [](float& memory, float value) { memory = value; });
  step({{{made.id, 0, made.num_prompt_tokens, BlockTable{blocks_}}}, {}});
  const FinishedRequest done = scheduler->finished(made.id, made.num_prompt_tokens, {blocks_}, false);
  step();  // saves the tail
  return {endpoint_, done.handoff_name, done.handoff_tokens};
}

ShapedNode::Loaded ShapedNode::load(const std::string& id, const std::vector<std::int32_t>& prompt,
                                    const std::optional<HandoffSource>& source, float seed) {
  for (Rank& rank : ranks_) std::fill(rank.memory.begin(), rank.memory.end(), -1.0F);
  NewRequest made = new_request(id, prompt);
  made.source = source;
  scheduler->add_request(made);
  const Answer answer = answered_lookup(*scheduler, made.id, 0, [this] { step(); });
  scheduler->allocated(made.id, answer.num_external, {blocks_});
  step({{{made.id, answer.num_external, 1, BlockTable{blocks_}}}, {}});
  Loaded loaded{answer.num_external, 0};
  each(answer.num_external, seed, [&](float& memory, float value) { loaded.wrong += memory == value ? 0 : 1; });
  scheduler->finished(made.id, answer.num_external, {blocks_}, true);
  return loaded;
}

void ShapedNode::damage(std::uint32_t rank) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    std::uint64_t begin = 0, end = 0;
    if (line.find(segments_[rank] + " ") == std::string::npos && !line.ends_with(segments_[rank])) continue;
    if (std::sscanf(line.c_str(), "%lx-%lx", &begin, &end) != 2) continue;
    // damages slot 0, which has the first chunk that was saved
    *reinterpret_cast<std::byte*>(begin + 100) ^= std::byte{1};
    return;
  }
  throw std::runtime_error("no memory called " + segments_[rank]);
}

}  // namespace kvferry
