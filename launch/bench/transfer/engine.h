// One way to move bytes, run by a benchmark's worker process. A measurement has two workers: the initiator moves
// the bytes, the target owns the other memory and answers.
#pragma once

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "launch/bench/harness/bench_memory.h"
#include "launch/bench/harness/failure.h"
#include "launch/bench/transfer/pattern.h"

namespace kvferry::bench {

constexpr TimeNs kPatience = 60 * kSecond;  // longer than any transfer or start may take

/// The configuration of a worker; the first message to it has the same fields (peers/bench_worker.py reads them too).
struct WorkerSpec {
  std::string engine;
  std::string setting;
  std::string path;
  MemoryKind memory = MemoryKind::kKvferry;
  Side side = Side::kInitiator;
  std::uint64_t bytes = 0;
  int core = -1;     // core of the calling thread, not of the engine's own threads; -1: any
  std::string host;  // this side's address on the route to the other side
};

nlohmann::json to_json(const WorkerSpec& spec);
/// Failure kInvalidArgument: a field is missing or out of bounds.
WorkerSpec worker_spec(const nlohmann::json& message);

/// Used by one thread. Errors are thrown as a Failure. Every wait is limited to kPatience and ends early with
/// kCancelled on the user's interrupt.
class Engine {
 public:
  virtual ~Engine() = default;

  /// Returns the argument of the other side's connect(). `memory` must outlive the engine.
  virtual nlohmann::json start(const WorkerSpec& spec, BenchMemory& memory) = 0;
  virtual void connect(const nlohmann::json& peer) = 0;
  virtual std::string describe() const { return ""; }

  /// Computes the orders of the blocks; its time is not measured. `call_bytes` is for engines that limit the bytes of a
  /// system call.
  virtual void prepare(const Job& job, Side side, [[maybe_unused]] std::uint64_t call_bytes) {
    job_ = job;
    own_ = block_offsets(job, side);
    others_ = block_offsets(job, side == Side::kInitiator ? Side::kTarget : Side::kInitiator);
  }
  /// Moves all blocks of the job with one request: from building its descriptors until the target's answer.
  virtual void transfer() = 0;
  /// The target's part of transfer(): waits for the notification, then answers.
  virtual void answer() {}
  /// Sends one block with a notification to the other side, and waits until the other side has sent the same back.
  virtual void ping() = 0;
  /// The target's part of ping().
  virtual void pong() {}
  /// Returns true if ping() is a round trip, half of which is the latency; false if ping() goes one way.
  virtual bool is_round_trip() const { return true; }

  /// Returns the target's memory if the engine holds it in this process; else empty.
  virtual std::span<std::byte> target_memory() { return {}; }

 protected:
  Job job_;
  std::vector<std::uint64_t> own_, others_;  // offsets of the job's blocks on this side and on the other one
};

std::unique_ptr<Engine> make_kvferry_engine();
std::unique_ptr<Engine> make_memcpy_engine();
std::unique_ptr<Engine> make_cma_engine();
std::unique_ptr<Engine> make_socket_engine();
std::unique_ptr<Engine> make_ucx_engine();

}  // namespace kvferry::bench
