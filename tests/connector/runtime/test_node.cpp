#include "tests/connector/runtime/test_node.h"

#include <gtest/gtest.h>

#include <stdexcept>

#include "kernels/device/element.h"
#include "tests/transport/ucx_over_tcp.h"

namespace kvferry {
namespace {

float value_at(float seed, std::uint32_t layer, std::uint32_t plane, std::uint32_t head, std::uint32_t token,
               std::uint32_t dim) {
  return seed * 1000.0F + static_cast<float>(token) +
         0.001F * static_cast<float>(dim + 10 * head + 100 * plane + 300 * layer);
}

float rounded(float value, ElementType type) {
  return type == ElementType::kBf16 ? device::Bf16::to_float(device::Bf16::from_float(value)) : value;
}

}  // namespace

TestController::TestController(const std::string& bind, const std::string& key_file) {
  controller::ServerOptions options;
  options.bind = bind;
  options.cluster_key = value_or_throw(net::read_cluster_key(key_file));
  server_ = value_or_throw(controller::Server::bind(options, clock_));
  thread_ = std::thread([this] { server_->run(); });
}

TestController::~TestController() {
  server_->stop();
  thread_.join();
}

TestNode::TestNode(const std::string& controller, const std::string& engine_id, const std::string& model,
                   const std::string& more_config, std::shared_ptr<SimDevice> device, const std::string& role,
                   ElementType chunk_type, const std::string& conversion)
    : device_(std::move(device)),
      memory_(std::size_t{kLayers} * kNumBlocks * kHeads * 2 * kBlockTokens * kDim),
      chunk_type_(chunk_type) {
  if (device_) let_ucx_use_tcp();  // so that GPU memory has this path too
  KvLayout layout;
  layout.num_kv_heads = kHeads;
  layout.head_dim = kDim;
  layout.element_bytes = sizeof(float);
  layout.block_tokens = kBlockTokens;
  layout.num_blocks = kNumBlocks;
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
    const auto plane = [&](std::uint32_t which) {
      const auto base = reinterpret_cast<std::uint64_t>(&cell(0, 0, layer, which, 0, 0));
      const auto stride = [&](BlockId block, std::uint32_t row, std::uint32_t head, std::uint32_t dim) {
        return static_cast<std::int64_t>(reinterpret_cast<std::uint64_t>(&cell(block, row, layer, which, head, dim)) -
                                         base);
      };
      return PlaneLayout{base, stride(1, 0, 0, 0), stride(0, 0, 1, 0), stride(0, 1, 0, 0), stride(0, 0, 0, 1)};
    };
    layout.layers.push_back({"layer" + std::to_string(layer), 0, plane(0), plane(1)});
  }
  SchedulerOptions options;
  options.config = value_or_throw(
      load_config(R"({"chunk_tokens": 8, "pool_bytes": "64KiB", "load_timeout_ms": 3000, "controller": ")" +
                      controller + "\"" + more_config + "}",
                  [](const char*) { return nullptr; }));
  options.engine_id = EngineId{engine_id};
  options.role = role;
  options.fingerprint = model;
  options.groups = {{kBlockTokens}};
  options.start_timeout_ms = 2000;
  options.on_device = device_ != nullptr;
  options.conversion = conversion;
  scheduler = value_or_throw(SchedulerNode::start(options));
  WorkerOptions worker_options{options.config, 0, engine_id, {layout}};
  if (device_) worker_options.gpu = make_sim_gpu(device_);
  if (chunk_type != ElementType::kFp32) worker_options.formats = {{{}, ElementType::kFp32, chunk_type, {}}};
  worker = value_or_throw(WorkerNode::start(std::move(worker_options)));
  const Result<void> attached = scheduler->attach_workers({worker->handshake()});
  if (!attached) throw std::runtime_error(attached.error().what);
}

TestNode::~TestNode() {
  if (scheduler) scheduler->shutdown();
  if (worker) worker->shutdown();
  worker.reset();
  sync();
}

void TestNode::sync() {
  if (device_ && !value_or_throw(DeviceEvent::record(*device_, nullptr)).wait())
    throw std::runtime_error("the device does not end its work");
}

/// Runs `work` in the order of the device's default stream. Without a device, `work` is done when this function
/// returns.
void TestNode::run(std::function<void()> work) {
  if (!device_) return work();
  device_->enqueue(nullptr, [work = std::move(work)] {
    work();
    return true;
  });
}

float& TestNode::cell(BlockId block, std::uint32_t row, std::uint32_t layer, std::uint32_t plane, std::uint32_t head,
                      std::uint32_t dim) {
  // [layer][block][head][K transposed, then V], as in vLLM's CPU backend.
  const std::size_t slab =
      ((std::size_t{layer} * kNumBlocks + static_cast<std::size_t>(block)) * kHeads + head) * 2 * kBlockTokens * kDim;
  const std::size_t within =
      plane == 0 ? std::size_t{dim} * kBlockTokens + row : std::size_t{kBlockTokens} * kDim + row * kDim + dim;
  return memory_[slab + within];
}

void TestNode::compute(const std::vector<BlockId>& blocks, std::uint32_t from, std::uint32_t to, float seed) {
  run([=, this] { compute_now(blocks, from, to, seed); });
}

void TestNode::compute_now(const std::vector<BlockId>& blocks, std::uint32_t from, std::uint32_t to, float seed) {
  for (std::uint32_t t = from; t < to; ++t) {
    for (std::uint32_t layer = 0; layer < kLayers; ++layer)
      for (std::uint32_t plane = 0; plane < 2; ++plane)
        for (std::uint32_t head = 0; head < kHeads; ++head)
          for (std::uint32_t dim = 0; dim < kDim; ++dim)
            cell(blocks[t / kBlockTokens], t % kBlockTokens, layer, plane, head, dim) =
                value_at(seed, layer, plane, head, t, dim);
  }
}

std::uint32_t TestNode::wrong_tokens(const std::vector<BlockId>& blocks, std::uint32_t from, std::uint32_t to,
                                     float seed) {
  sync();
  std::uint32_t wrong = 0;
  for (std::uint32_t t = from; t < to; ++t) {
    bool right = true;
    for (std::uint32_t layer = 0; layer < kLayers; ++layer)
      for (std::uint32_t plane = 0; plane < 2; ++plane)
        for (std::uint32_t head = 0; head < kHeads; ++head)
          for (std::uint32_t dim = 0; dim < kDim; ++dim)
            right &= cell(blocks[t / kBlockTokens], t % kBlockTokens, layer, plane, head, dim) ==
                     rounded(value_at(seed, layer, plane, head, t, dim), chunk_type_);
    wrong += right ? 0 : 1;
  }
  return wrong;
}

void TestNode::wipe() {
  run([this] { memory_.assign(memory_.size(), -1.0F); });
}

std::uint32_t TestNode::lookup(const std::string& id, std::uint32_t num_local) {
  return answered_lookup(*scheduler, RequestId{id}, num_local, [this] { step(); }).num_external;
}

std::uint32_t load(TestNode& node, const NewRequest& made, float seed) {
  node.wipe();
  node.scheduler->add_request(made);
  const std::uint32_t external = node.lookup(made.id.value);
  node.scheduler->allocated(made.id, external, {kOtherBlocks});
  if (external > 0 && node.loads_async()) {
    node.settle();
    const auto is_loaded = std::pair(made.id.value, true);
    EXPECT_EQ(std::exchange(node.finished_loads, {}), std::vector<WorkerNode::FinishedLoad>{is_loaded});
    node.scheduler->allocated(made.id, 0, {kOtherBlocks});
  }
  node.step({{{made.id, external, 1, BlockTable{kOtherBlocks}}}, {}},
            [&] { EXPECT_EQ(node.wrong_tokens(kOtherBlocks, 0, external, seed), 0u); });
  return external;
}

}  // namespace kvferry
