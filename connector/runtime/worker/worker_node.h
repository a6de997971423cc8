// One rank's node: owns the chunk pool's memory and copies between it and the engine's blocks during the step. A second
// thread (ServiceLoop) exchanges chunks with other nodes' pools.
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

/// Threads: the engine's worker thread calls the step methods; any thread may call take_report() and handshake().
class WorkerNode {
 public:
  /// kUnavailable: no shared memory left, or no transport. kInvalidArgument: a pool that holds less than two chunks, or
  /// an invalid layout.
  static Result<std::unique_ptr<WorkerNode>> start(WorkerOptions options);
  ~WorkerNode();

  /// An encoded WorkerHello for the scheduler node.
  std::string handshake() const;
  /// One sentence for the log with the pool's size, its slots and the transport.
  std::string describe() const;

  // `stream` is the engine's stream, in which it reads and writes the blocks.
  /// Begins a step: takes its plan and packs the blocks that the step may overwrite. kCorrupt: the bytes are not a
  /// plan.
  Result<void> begin_step(std::string_view plan, DeviceStream stream = nullptr);
  /// Before the forward pass: unpacks the chunks that the step's requests load.
  void load(DeviceStream stream = nullptr);
  /// Whether the step's plan has saves that are pushed to another node layer by layer, so that save_layer() is useful.
  bool wants_layers() const;
  /// During the forward pass, when a layer's KV is in its blocks. The layers come in the order of the layout.
  void save_layer(std::uint32_t layer);
  /// After the forward pass: packs the chunks that are full now. With a GPU a later step may report them.
  void save(DeviceStream stream = nullptr);

  /// The report for the scheduler; nullopt if there is nothing to report.
  std::optional<std::string> take_report();
  /// Blocks whose synchronous load has failed since the last call.
  std::vector<BlockId> take_failed_blocks();
  struct FinishedLoad {
    std::string request_id;
    bool ok = false;  // false: no block of the load may be used
  };
  /// Asynchronous loads that have ended since the last call, each once.
  std::vector<FinishedLoad> take_finished_loads();

  /// Ends the service thread and the transport. Idempotent.
  void shutdown();

 private:
  struct Impl;
  explicit WorkerNode(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvferry
