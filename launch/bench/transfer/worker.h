// A worker process, which is one side of a measurement. It reads commands from stdin as lines of JSON, executes them,
// and writes the answers to stdout. peers/bench_worker.py executes the same commands in the worker processes of other
// systems, such as NIXL. The listener passes each command on to the worker whose number is the command's "worker". The
// commands and their answers:
//
//   first line: the WorkerSpec              -> {"peer": {...}, "huge_page_bytes": n}
//   {"do": "connect", "peer": {...}}        -> {}
//   {"do": "prepare", "job": {...}}         -> {}
//   {"do": "fill", "seed": n}               -> {}
//   {"do": "transfer"}                      -> {"seconds": s, "cpu_s": s}
//   {"do": "answer"}                        -> {"ready": true}, then {"cpu_s": s}
//   {"do": "ping", "rounds": n}             -> {"p50_us": t, "p99_us": t}, one way
//   {"do": "pong", "rounds": n}             -> {"ready": true}, then {}
//   {"do": "verify", "seed": n}             -> {"verified": bool, "describe": "..."}
//
// In place of an answer, {"error": what, "code": n} reports an error. The worker ends after an error, and when its
// stdin is closed.
#pragma once

#include <nlohmann/json.hpp>

#include "launch/bench/harness/programs.h"
#include "launch/bench/transfer/engine.h"

namespace kvferry::bench {

nlohmann::json to_json(const Job& job, std::uint64_t call_bytes);

/// Returns the command that starts an engine's worker on this host. Failures: kInvalidArgument if there is no such
/// engine, or if a peer does not have the setting; kUnavailable if the engine is ucx, and libucx-cu13 is not installed.
Command worker_command(const WorkerSpec& spec);

}  // namespace kvferry::bench
