// One way to carry bytes, as a benchmark's worker process drives it. A worker is one half of a measurement: the
// initiator's moves the bytes, the target's owns the other memory and answers.
#pragma once

#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "launch/bench/harness/bench_memory.h"
#include "launch/bench/transfer/pattern.h"
#include "transport/base/result.h"

namespace kvferry::bench {

constexpr TimeNs kPatience = 60 * kSecond;  // longer than any transfer or start may take

/// What a worker is started with: the same fields in its first message (peers/worker.py reads them too).
struct WorkerSpec {
  std::string engine;
  std::string setting;
  std::string path;
  MemoryKind memory = MemoryKind::kKvferry;
  Side side = Side::kInitiator;
  std::uint64_t bytes = 0;
  int core = -1;     // for the calling thread, not for an engine's own; -1: any
  std::string host;  // this side's address on the route to the other one
};

nlohmann::json to_json(const WorkerSpec& spec);
/// kInvalidArgument: a field is missing or out of bounds.
Result<WorkerSpec> worker_spec(const nlohmann::json& message);

/// One thread. Every wait is bounded by kPatience and ends early with kCancelled on the user's interrupt.
class Engine {
 public:
  virtual ~Engine() = default;

  /// Gives what the other side's connect() needs. The memory outlives the engine.
  virtual Result<nlohmann::json> start(const WorkerSpec& spec, BenchMemory& memory) = 0;
  virtual Result<void> connect(const nlohmann::json& peer) = 0;
  virtual std::string describe() const { return ""; }

  /// Not timed; `call_bytes` is for engines that have such a knob.
  virtual void prepare(const Job& job, std::uint64_t call_bytes) = 0;
  /// One request with all blocks of the job, from building its descriptors to the target's answer.
  virtual Result<void> transfer() = 0;
  /// The target's half: sleeps until the notification is here, then answers.
  virtual Result<void> answer() { return {}; }
  /// One block with notification to the other side, and back; the target's half.
  virtual Result<void> ping() = 0;
  virtual Result<void> pong() { return {}; }
  /// Round trips count half. False: ping() is one way.
  virtual bool is_round_trip() const { return true; }

  /// An engine that needs no other process has the target's memory here.
  virtual std::span<std::byte> target_memory() { return {}; }
};

std::unique_ptr<Engine> make_kvferry_engine();
std::unique_ptr<Engine> make_memcpy_engine();
std::unique_ptr<Engine> make_cma_engine();
std::unique_ptr<Engine> make_socket_engine();
std::unique_ptr<Engine> make_ucx_engine();

}  // namespace kvferry::bench
