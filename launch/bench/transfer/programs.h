// Which program is which engine's worker, on this host.
#pragma once

#include "launch/bench/harness/child_process.h"
#include "launch/bench/transfer/engine.h"

namespace kvferry::bench {

/// kInvalidArgument: no such engine, setting or path; kUnavailable: a peer that is not installed here.
Result<Command> worker_command(const WorkerSpec& spec);

/// This program's file, or, where that is a test, the `kvferry` next to it. kUnavailable: there is none.
Result<std::string> kvferry_program();

/// `kvferry` itself with other words behind it.
Command self_command(std::vector<std::string> words);

}  // namespace kvferry::bench
