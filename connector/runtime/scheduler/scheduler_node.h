// One engine's scheduler node: the scheduler core behind a lock, and a thread that carries its actions to the
// controller, to other nodes and to this engine's workers, and brings back what they answer.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "connector/core/scheduler/scheduler_core.h"
#include "connector/runtime/config.h"
#include "transport/base/ids.h"
#include "transport/base/result.h"

namespace kvferry {

struct SchedulerOptions {
  ConnectorConfig config;
  EngineId engine_id;
  std::string role;         // kv_role
  std::string fingerprint;  // readable; see controller::NodeInfo
  std::uint32_t block_tokens = 16;
  std::vector<std::uint32_t> windows = {0};  // as in CoreConfig
  bool runs_ahead = false;                   // as in CoreConfig
  std::int64_t start_timeout_ms = 10'000;
};

/// Threads: the engine's methods belong to the engine's scheduler thread. None of them blocks on the network, except
/// lookup(), which waits up to 2 ms per step for an answer that is on its way.
class SchedulerNode {
 public:
  /// kInvalidArgument: chunk_tokens is no multiple of block_tokens. kUnavailable: no port, or the controller was not
  /// reachable within start_timeout_ms. kRefused: the controller said no, e.g. another model in this namespace.
  static Result<std::unique_ptr<SchedulerNode>> start(SchedulerOptions options);
  ~SchedulerNode();

  /// The workers' handshakes, in rank order; before the first request. kInvalidArgument: they don't fit together.
  Result<void> attach_workers(const std::vector<std::string>& hellos);

  /// Where other nodes ask for leases: host and port of kv_transfer_params' remote_host and remote_port.
  const std::string& host() const;
  std::uint16_t port() const;

  void add_request(const NewRequest& request);
  void update_tokens(const RequestId& id, std::uint32_t keep, std::span<const std::int32_t> new_tokens);
  std::uint32_t num_tokens(const RequestId& id) const;
  Answer lookup(const RequestId& id, std::uint32_t num_local);
  void allocated(const RequestId& id, std::uint32_t num_external, const BlockTable& blocks);
  std::string build_step(const StepInput& input, const TokenSource& tokens = {});
  FinishedRequest finished(const RequestId& id, std::uint32_t num_computed, const BlockTable& blocks, bool aborted);
  /// kCorrupt: not a report.
  Result<void> worker_report(std::string_view report);
  /// Whether a worker was told to save something and has not reported it. The engine then has to go on stepping, even
  /// with nothing to compute: reports come with steps.
  bool has_unreported_saves() const;
  void reset_cache();

  /// Monotone counters and momentary gauges by metric name, without the kvferry_ prefix.
  std::map<std::string, double> metrics() const;
  /// The same when they have changed since the last call; while requests are served at most ten times a second, since
  /// it is asked in every step.
  std::optional<std::map<std::string, double>> take_metrics();

  /// Says goodbye to the controller and joins the thread. Idempotent.
  void shutdown();

 private:
  struct Impl;
  explicit SchedulerNode(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvferry
