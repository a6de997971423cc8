// A worker process: one side of a measurement, which obeys JSON lines on stdin. peers/bench_worker.py is the same in
// Python.
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
// In place of an answer, {"error": what, "code": n} reports an error. The worker ends when its stdin does.
#pragma once

#include <nlohmann/json.hpp>

#include "launch/bench/transfer/pattern.h"

namespace kvferry::bench {

nlohmann::json to_json(const Job& job, std::uint64_t call_bytes);

}  // namespace kvferry::bench
