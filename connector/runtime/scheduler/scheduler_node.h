// One engine's scheduler node: the scheduler core behind a lock, and a thread that exchanges messages with the
// controller, other nodes and this engine's workers.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "connector/runtime/config.h"
#include "connector/runtime/links/node_links.h"
#include "connector/runtime/scheduler/node_metrics.h"
#include "transport/base/net/host_port.h"

namespace kvferry {

struct SchedulerOptions {
  ConnectorConfig config;
  EngineId engine_id;
  std::string role;         // vLLM's kv_role
  std::string fingerprint;  // the model and its KV format as text, see transport/base/fingerprint.h
  // The next seven fields have the same meaning as in CoreConfig.
  std::vector<KvGroup> groups = {{}};
  bool whole_blocks = false;
  bool keeps_state = false;
  std::uint32_t checkpoint_alignment = 0;
  bool runs_ahead = false;
  bool on_device = false;
  std::uint64_t prepared_tokens_max = 0;
  std::int64_t start_timeout_ms = 10'000;
  /// Says for the status which data types differ between this node and the servers whose chunks it reads. Empty: the
  /// setting chunk_dtype is not in effect. A node with the setting in effect saves nothing (CoreConfig::only_reads).
  std::string conversion = {};
};

/// The scheduler node of one engine. All methods are called on the engine's scheduler thread, except transfers_after(),
/// which any thread may call. Between start() and shutdown() only lookup() waits for the network, in all lookups of a
/// step together for at most 2 ms, and rest().
class SchedulerNode {
 public:
  /// Starts the node and registers it with the controller. Errors: kInvalidArgument if a setting can't be used, for
  /// example if chunk_tokens is no multiple of every group's block size; kUnavailable if no port or file descriptor is
  /// free, or the controller was not reachable within start_timeout_ms; kRefused if the controller refused this node,
  /// for example because the namespace has another model.
  static Result<std::unique_ptr<SchedulerNode>> start(SchedulerOptions options);

  /// Takes the workers' handshakes in rank order. Must be called before the first request. Errors: kCorrupt if the
  /// bytes are not handshakes; kInvalidArgument if there are none, or they are out of order or contradict each other;
  /// those of ClientSocket::connect().
  Result<void> attach_workers(const std::vector<std::string>& hellos);

  /// The address at which other nodes reach this node: remote_host and remote_port in kv_transfer_params.
  const std::string& host() const { return address_.host; }
  std::uint16_t port() const { return address_.port; }

  void add_request(NewRequest request);
  void update_tokens(const RequestId& id, std::uint32_t keep, std::span<const std::int32_t> new_tokens);
  std::uint32_t num_tokens(const RequestId& id);
  /// Returns the same as SchedulerCore::handle_of().
  RequestHandle handle_of(const RequestId& id) const {
    const std::lock_guard lock(shared_.mutex);
    return shared_.core->handle_of(id);
  }
  Answer lookup(const RequestId& id, std::uint32_t num_local);
  void allocated(const RequestId& id, std::uint32_t num_external, const BlockTable& blocks);
  std::string build_step(const StepInput& input, const TokenSource& tokens = {});
  FinishedRequest finished(const RequestId& id, std::uint32_t num_computed, const BlockTable& blocks, bool aborted);
  /// Takes in a report of a worker. Errors: kCorrupt if the bytes are not a report.
  Result<void> worker_report(std::string_view report);
  /// Pauses an engine that has only preparations, so that its steps, which do nothing but unpack what has arrived, do
  /// not take a whole processor. Returns after 8 ms, or at the next message of another node or a worker. Once all
  /// chunks are here, returns after 3 ms, since the prepared request is about to arrive.
  void rest() {
    std::unique_lock lock(shared_.mutex);
    shared_.changed.wait_for(lock, std::chrono::milliseconds(shared_.core->awaits_prepared_chunks() ? 8 : 3));
  }
  /// Returns true if a worker has not reported a save yet. The engine must then run more steps, even without requests,
  /// because reports come with steps.
  bool has_unreported_saves() const;
  /// Returns true if a worker has not reported a load yet. Until the report the engine keeps the load's blocks, even if
  /// the request was aborted.
  bool has_unreported_loads() const;
  /// Returns SchedulerCore::Purge::num_of_engine as of the last lookup() or build_step().
  std::uint64_t num_engine_purges() const { return num_engine_purges_; }
  void reset_cache();
  /// Sets the weights epoch that the engine's process uses in the extras of requests; this node only reports it.
  void set_weights_epoch(std::string epoch);

  // The next methods do the same as those of SchedulerCore, under the lock.
  void track_pool();
  PoolChanges take_pool_changes();
  std::vector<NamedChunk> take_named_chunks();

  /// Returns counters and gauges by metric name, without the kvferry_ prefix.
  std::map<std::string, double> metrics();
  /// Same as metrics(), but returns nullopt if the values have not changed since take_metrics() last returned them, or
  /// if there are requests and take_metrics() last returned values less than 100 ms ago. Every step calls this
  /// function, so it has to be fast.
  std::optional<std::map<std::string, double>> take_metrics();

  /// Returns the number of the last recorded event, for the next call, and the result of
  /// FlightRecorder::transfers_after() for event `number`.
  std::pair<std::uint64_t, std::vector<RequestLife>> transfers_after(std::uint64_t number);

  /// Deregisters from the controller and joins the thread. A second call does nothing.
  void shutdown() { links_.shutdown(); }

 private:
  SchedulerNode(SchedulerOptions options, net::HostPort address, std::string member, Incarnation incarnation,
                std::unique_ptr<controller::Client> directory, std::unique_ptr<ServerSocket> peers);
  /// Runs `call` on the core under the core's lock, then hands the core's actions to the links.
  template <class Call>
  auto with_core(Call call);

  SchedulerOptions options_;
  SteadyClock clock_;
  net::HostPort address_;
  std::string member_;  // CoreConfig::member
  Incarnation incarnation_;
  SharedCore shared_;
  NodeLinks links_;
  std::chrono::steady_clock::duration patience_left_;
  NodeMetrics reported_;  // values that take_metrics() returned last
  TimeNs reported_at_ = 0;
  std::uint32_t num_ranks_ = 0;
  std::uint64_t num_engine_purges_ = 0;
};

}  // namespace kvferry
