// A worker process: one half of a measurement, obeying JSON lines on stdin. peers/worker.py is the same in Python.
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
// An error is {"error": what, "code": n} in place of an answer; the worker ends when stdin does.
#pragma once

#include <nlohmann/json.hpp>

#include "launch/bench/transfer/pattern.h"
#include "transport/base/result.h"

namespace kvferry::bench {

nlohmann::json to_json(const Job& job, std::uint64_t call_bytes);

/// Serves stdin and stdout until stdin ends. Errors only where nothing could be said to the driver.
Result<void> run_worker();

}  // namespace kvferry::bench
