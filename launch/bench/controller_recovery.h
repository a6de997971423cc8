// How soon a controller serves again after its process was killed, with its state and without.
#pragma once

#include <cstdint>

#include "transport/base/result.h"

namespace kvferry::bench {

struct RecoveryFigures {
  double recovery_s = 0;     // from the start of a new process on the killed one's state to its first right answer
  double cold_resync_s = 0;  // all workers' snapshots through client, socket and wire into an empty controller
  double worst_lookup_us_while_snapshot = 0;  // a look-up waits for what else the thread does in its turn
  double snapshot_s = 0;
  double state_bytes = 0;
};

/// Starts this program as a controller, in a folder of its own under the system's for temporary files; takes down what
/// it starts. kCorrupt: a wrong answer; then no figure is worth anything.
Result<RecoveryFigures> measure_recovery(std::uint64_t num_prefixes);

}  // namespace kvferry::bench
