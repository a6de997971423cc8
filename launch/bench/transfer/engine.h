// A way to move bytes, used by a benchmark's worker process. A measurement has two workers, each with a memory of its
// own: the initiator starts the transfers between the two memories, and the target answers. The engine memcpy has only
// the initiator.
#pragma once

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "launch/bench/harness/bench_memory.h"
#include "launch/bench/harness/failure.h"
#include "launch/bench/transfer/pattern.h"

namespace kvferry::bench {

constexpr TimeNs kPatience = 60 * kSecond;  // limit on a worker's wait for a transfer, and on the start of a process

/// The configuration of a worker. The first message to the worker has the same fields (peers/bench_worker.py reads them
/// too).
struct WorkerSpec {
  std::string engine;
  std::string setting;
  std::string path;
  MemoryKind memory = MemoryKind::kKvferry;
  Side side = Side::kInitiator;
  std::uint64_t bytes = 0;
  int core = -1;     // core to which the worker's calling thread is pinned, not the engine's own threads; -1: any core
  std::string host;  // this worker's address on the route to the other worker
};

nlohmann::json to_json(const WorkerSpec& spec);
/// Throws a Failure kInvalidArgument if the number of bytes or the core is out of bounds. A missing field has the value
/// 0, -1 (the core), kForeign (the memory), kTarget (the side) or an empty text.
WorkerSpec worker_spec(const nlohmann::json& message);

/// One side of the measured system. Only one thread may use it. Errors are thrown as a Failure. After connect(), every
/// wait is limited to kPatience, and ends early with kCancelled if the user interrupts the benchmark.
class Engine {
 public:
  virtual ~Engine() = default;

  /// Prepares this side. Returns the argument for connect() in the other worker. `memory` must outlive the engine.
  virtual nlohmann::json start(const WorkerSpec& spec, BenchMemory& memory) = 0;
  virtual void connect(const nlohmann::json& peer) = 0;
  virtual std::string describe() const { return ""; }

  /// Computes the order in which each side uses its blocks. The time of this call is not measured. `call_bytes` is for
  /// engines that limit the bytes of a system call.
  virtual void prepare(const Job& job, Side side, [[maybe_unused]] std::uint64_t call_bytes) {
    job_ = job;
    own_ = block_offsets(job, side);
    others_ = block_offsets(job, side == Side::kInitiator ? Side::kTarget : Side::kInitiator);
  }
  /// Moves all blocks of the job with one request. The time of the whole call is measured. It includes building the
  /// request's descriptors, and waiting for the target's answer if the engine has one.
  virtual void transfer() = 0;
  /// The target's part of transfer(), such as waiting for the notification and answering.
  virtual void answer() {}
  /// Moves one block. If is_round_trip(), also notifies the target and waits until the target has done the same.
  virtual void ping() = 0;
  /// The target's part of ping().
  virtual void pong() {}
  /// Returns true if ping() is a round trip, so that the latency is half of its time; false if ping() goes one way.
  virtual bool is_round_trip() const { return true; }

  /// Returns the target's memory if the engine holds that memory in this process, otherwise an empty span.
  virtual std::span<std::byte> target_memory() { return {}; }

 protected:
  Job job_;
  std::vector<std::uint64_t> own_, others_;  // offsets of the job's blocks on this side and on the other side
};

std::unique_ptr<Engine> make_kvferry_engine();
std::unique_ptr<Engine> make_memcpy_engine();
std::unique_ptr<Engine> make_cma_engine();
std::unique_ptr<Engine> make_socket_engine();
std::unique_ptr<Engine> make_ucx_engine();

}  // namespace kvferry::bench
