// The program that is an engine's worker on this host.
#pragma once

#include "launch/bench/harness/programs.h"
#include "launch/bench/transfer/engine.h"

namespace kvferry::bench {

/// Failures: kInvalidArgument (no such engine, setting or path), kUnavailable (the peer is not installed on this host).
Command worker_command(const WorkerSpec& spec);

}  // namespace kvferry::bench
