// Transports within one process, for tests and simulation: no thread, no clock, no socket; faults come from a seed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "transport/transport.h"

namespace kvferry {

class LoopbackCore;

struct LoopbackOptions {
  std::uint64_t seed = 1;             // of every random choice below; the same calls in the same order replay
  double loss_rate = 0.0;             // chance that a transfer loses its peer somewhere in its copies
  std::uint32_t delay_steps_max = 0;  // a transfer waits 0 to this many steps between its last copy and its completion
  bool held = false;                  // start as after hold()
};

/// What the transports of one simulated network share. Outlives nothing: transports may be destroyed later than it.
/// Running: submit() moves everything before it returns. Held: nothing moves but by step(), one thing at a time.
/// Threads: any, but only one thread gives a replayable run.
class LoopbackFabric {
 public:
  explicit LoopbackFabric(LoopbackOptions options = {});

  /// A new process, so to say: its address is like no other before. transfers_max: as in submit()'s kFull.
  std::unique_ptr<Transport> make_transport(std::uint32_t transfers_max = 1024);

  void hold();
  void release();
  /// Does one copy, one waiting step or one completion of a transfer chosen by the seed among the most urgent of each
  /// peer. False: nothing can move.
  bool step();
  /// Like kill -9: its peers' transfers with it end in kPeerLost, its own in kCancelled, its address stays dead.
  void kill(const std::string& address);
  /// The next num_transfers accepted ones lose their peer before the first copy (kPeerLost), whatever loss_rate says.
  void fail_next(std::uint32_t num_transfers);

 private:
  std::shared_ptr<LoopbackCore> core_;
};

}  // namespace kvferry
