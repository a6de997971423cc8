// The parts of `kvferry bench controller`. Each adds rows and figures to the report.
#pragma once

#include "launch/bench/controller/controller_far_side.h"
#include "launch/bench/controller/controller_report.h"
#include "launch/bench/harness/controller_load.h"

namespace kvferry::bench {

constexpr std::size_t kNumSteps = 24;  // steps of the progress bar in all parts together

// Every part fails with kCorrupt if a lookup answered wrongly, since no figure of such a run is worth anything.

/// Lookups over the controller's sockets, next to an empty message over the same kind of socket. kUnavailable: the
/// server's process does not come up. Forks, so that no other thread may run; see ControllerFarSide.
void measure_remote(const ControllerLoad& load, ControllerReport& report);

/// The time until other nodes find what a node publishes while it publishes a lot. kUnavailable: no answer.
void measure_visible(const ControllerFarSide& far, ControllerReport& report);

/// The index and the directory on one core, in this process.
void measure_local(const ControllerLoad& load, ControllerReport& report);

/// The rate at which the controller decodes and indexes vLLM's cache events, encoded as vLLM encodes them.
void measure_events(const ControllerLoad& load, ControllerReport& report);

/// The time until a controller serves again after its process was killed, with its state and without. Starts this
/// program as a controller in a temporary folder, and ends it.
void measure_recovery(const ControllerLoad& load, ControllerReport& report);

}  // namespace kvferry::bench
