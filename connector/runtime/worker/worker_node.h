// One rank's node: owns the chunk pool's memory, and copies chunks between the pool and the engine's blocks in the
// engine's steps. A second thread (ServiceLoop) exchanges chunks with other nodes' pools.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "connector/runtime/config.h"
#include "connector/runtime/worker/service_loop.h"
#include "transport/shared_memory.h"

namespace kvferry {

struct WorkerOptions {
  ConnectorConfig config;
  std::uint32_t rank = 0;
  std::string label;              // names the shared memory segment; unique per engine on this machine
  std::vector<KvLayout> layouts;  // each has consecutive layers of one shape; several if the layers differ in shape
  /// The part of the model that the layouts have; a shard without layers: the whole model.
  Shard shard = {};
  /// Which bytes the rank has of each layer's KV or state; without layers: `shard` says all.
  ShardParts parts = {};
  std::optional<Gpu> gpu = {};           // the GPU that has the engine's blocks; empty: the blocks are in host memory
  TimeNs device_timeout = 30 * kSecond;  // time after which work given to the GPU counts as failed
  /// [layout] The types of the layout's elements in blocks and in chunks, with empty `scales` and `heads`. Empty:
  /// chunks have the same types as blocks.
  std::vector<ChunkFormat> formats = {};
};

/// The node of one rank. All methods run on the engine's worker thread, except handshake() and describe(), which any
/// thread may call.
class WorkerNode {
 public:
  /// Starts the node. Errors: kInvalidArgument if the layouts or settings can't be used, for example if the pool has
  /// room for fewer than two chunks; those of the shared memory, the GPU, the transport, the store and ServiceLoop.
  static Result<std::unique_ptr<WorkerNode>> start(WorkerOptions options);
  ~WorkerNode() { shutdown(); }

  /// Returns an encoded WorkerHello for the scheduler node.
  const std::string& handshake() const { return hello_; }
  /// Returns one sentence for the log with the pool's size, its slots and the transport.
  std::string describe() const;

  // `stream` is the stream in which the engine reads and writes the blocks.
  /// Begins a step: takes the step's plan and packs the blocks that the step may overwrite. With a GPU, also begins the
  /// step's loads, so that they run beside the forward pass. Errors: kCorrupt if the bytes are not a plan.
  Result<void> begin_step(std::string_view plan, DeviceStream stream = nullptr);
  /// Called before the forward pass, or after it if all loads are asynchronous. Unpacks the chunks that the step's
  /// requests load. Does nothing with a GPU.
  void load(DeviceStream stream = nullptr);
  /// Returns true if the step's plan has saves that are pushed layer by layer. With a GPU: if push_layers is set, and
  /// chunks are pushed at all.
  bool wants_layers() const { return wants_layers_; }
  /// Called in the forward pass when a layer's KV is in its blocks, for the layers in the order of KvLayout::layers.
  /// Packs this layer of the chunks that are pushed; with a GPU, all of the step's chunks, at the end of each group of
  /// layers.
  void save_layer(std::uint32_t layer, DeviceStream stream = nullptr);
  /// Called after the forward pass. Packs the chunks of the plan's saves_after. With a GPU, a later step may report
  /// these saves.
  void save(DeviceStream stream = nullptr) {
    wants_layers_ = false;
    save_all(std::exchange(plan_.saves_after, {}), stream);
  }

  /// Returns the report for the scheduler, nullopt if there is nothing to report.
  std::optional<std::string> take_report();
  /// Returns the blocks whose synchronous load has failed since the last call.
  std::vector<BlockId> take_failed_blocks() { return std::exchange(failed_blocks_, {}); }
  /// Returns the asynchronous loads that have ended since the last call: the request's id, and true if its blocks are
  /// good. If they are not good, none of the blocks may be used. The next report has the same loads: it must reach the
  /// scheduler together with the result of this call.
  using FinishedLoad = std::pair<std::string, bool>;
  std::vector<FinishedLoad> take_finished_loads();

  /// Ends the service thread and the transport. A second call does nothing.
  void shutdown();

 private:
  WorkerNode(WorkerOptions options, SharedMemory pool, std::uint32_t num_slots)
      : options_(std::move(options)), pool_(std::move(pool)), core_(options_.rank, num_slots) {}
  void choose_gpu_pool();
  Result<std::unique_ptr<ChunkStore>> make_store();
  void save_layer_on_gpu(std::uint32_t layer, DeviceStream stream);
  void save_all(const std::vector<SaveJob>& jobs, DeviceStream stream);
  void take_saved();
  void begin_loads(DeviceStream stream);
  void take_loaded();
  void loaded(const LoadJob& job, LoadOutcome outcome);

  WorkerOptions options_;
  std::uint64_t chunk_bytes_ = 0;
  bool has_default_pool_ = false, has_default_gpu_pool_ = false;  // true if the settings don't give the size
  SteadyClock clock_;
  SharedMemory pool_;
  DevicePin pool_pin_;
  std::unique_ptr<Transport> transport_;
  RegionId region_;
  std::unique_ptr<ChunkStore> store_;
  SharedWorkerCore core_;
  std::unique_ptr<ServiceLoop> service_;
  std::string hello_;
  StepPlan plan_;                        // plan of the current step
  bool wants_layers_ = false;            // the result of wants_layers()
  std::uint32_t layers_done_ = 0;        // with a GPU: number of layers for which save_layer() was called in this step
  std::set<ChunkRef> begun_;             // saves of this step that save_layer() has begun
  std::map<ChunkRef, SaveItem> pushed_;  // saves in progress that are pushed to another node
  std::vector<BlockId> failed_blocks_;
  std::vector<FinishedLoad> finished_loads_;
};

}  // namespace kvferry
