// One rank's node: owns the chunk pool's memory, copies between it and the engine's blocks inside the step, and pulls
// chunks from other nodes' pools on a thread of its own.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "connector/runtime/config.h"
#include "kernels/stream_packer.h"
#include "transport/base/clock.h"
#include "transport/base/ids.h"
#include "transport/base/kv_layout.h"
#include "transport/base/result.h"
#include "transport/base/shard_map.h"

namespace kvferry {

struct WorkerOptions {
  ConnectorConfig config;
  std::uint32_t rank = 0;
  std::string label;  // names the shared memory segment; unique per engine on this machine
  KvLayout layout;
  Shard shard = {};                      // layers and heads of the model in the layout; no layers: all of them
  std::optional<Gpu> gpu = {};           // where the engine's blocks are; empty: in host memory
  TimeNs device_timeout = 30 * kSecond;  // after which work given to the GPU counts as failed
};

/// Threads: the step methods belong to the engine's worker thread; take_report() and handshake() may come from any.
class WorkerNode {
 public:
  /// kUnavailable: no shared memory left, no transport. kInvalidArgument: a pool that holds less than two chunks, or a
  /// layout that can't be right.
  static Result<std::unique_ptr<WorkerNode>> start(WorkerOptions options);
  ~WorkerNode();

  /// For the scheduler node: where this rank's pool lies.
  std::string handshake() const;
  /// One sentence for the log: pool size, slots, path.
  std::string describe() const;

  // `stream`: the engine's, that its work on the blocks is in.
  /// First thing in a step: takes the plan and packs what would be overwritten. kCorrupt: the plan's bytes are not a
  /// plan.
  Result<void> begin_step(std::string_view plan, DeviceStream stream = nullptr);
  /// Before the forward: unpacks what the step's requests load.
  void load(DeviceStream stream = nullptr);
  /// Whether the step's plan has saves that go to another node layer by layer: then save_layer() is worth its call.
  bool wants_layers() const;
  /// In the forward, when a layer's KV is in its blocks; layers in order, as in the layout.
  void save_layer(std::uint32_t layer);
  /// After the forward: packs the chunks that are full now. With a GPU they may be reported in a later step.
  void save(DeviceStream stream = nullptr);

  /// What the scheduler has to hear of; nullopt when nothing happened.
  std::optional<std::string> take_report();
  /// Blocks whose load failed since the last call; of loads that the engine doesn't wait for.
  std::vector<BlockId> take_failed_blocks();
  struct FinishedLoad {
    std::string request_id;
    bool ok = false;  // false: none of it may be used
  };
  /// Loads that the engine waits for and that ended since the last call, each once.
  std::vector<FinishedLoad> take_finished_loads();

  /// Ends the thread and the transport. Idempotent.
  void shutdown();

 private:
  struct Impl;
  explicit WorkerNode(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvferry
