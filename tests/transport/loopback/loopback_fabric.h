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
  std::uint64_t seed = 1;             // seed of all random choices; the same calls in the same order replay a run
  double loss_rate = 0.0;             // chance that a transfer loses its peer during its copies
  std::uint32_t delay_steps_max = 0;  // a transfer waits 0 to this many steps between its last copy and its completion
  bool held = false;                  // whether the fabric starts in the state that hold() sets
  double measured_rate = 0;           // what Transport::measured_rate() returns for every path
};

/// A simulated network. Its transports may outlive it.
/// submit() moves all bytes before it returns; between hold() and release(), only step() moves bytes.
/// Threads: any, but a replayable run needs a single one.
class LoopbackFabric {
 public:
  explicit LoopbackFabric(LoopbackOptions options = {});

  /// Makes a transport that stands for a new process: its address is unique. `transfers_max`: as in CommonOptions.
  std::unique_ptr<Transport> make_transport(std::uint32_t transfers_max = 1024);

  void hold();
  void release();
  /// Does one copy, one waiting step or one completion of a transfer that the seed chooses among the most urgent of
  /// each peer. Returns false if there was none.
  bool step();
  /// Ends the transport at this address like kill -9: its own transfers end with kCancelled, present and later
  /// transfers of its peers with kPeerLost.
  void kill(const std::string& address);
  /// Makes the next `num_transfers` accepted transfers lose their peer before the first copy (kPeerLost).
  void fail_next(std::uint32_t num_transfers);

 private:
  std::shared_ptr<LoopbackCore> core_;
};

}  // namespace kvferry
