// RunHasher is the part of the service loop that executes ChecksumOrders: it hashes the runs (parts) of this rank's
// chunks that a reader of other parallelism will pull. progress() hashes one chunk only, so that the loop's other work
// does not wait long.
#pragma once

#include <cstdint>
#include <deque>

#include "connector/runtime/links/node_wire.h"
#include "connector/runtime/worker/worker_parts.h"

namespace kvferry {

/// Executes the ChecksumOrders of one rank. All methods run on the service thread.
class RunHasher {
 public:
  RunHasher(const WorkerParts& parts, const SendOutcome& send) : parts_(parts), send_(send) {}

  void start(ChecksumOrder order);
  /// Hashes one chunk and sends the chunk's outcome. Returns false if there was no chunk to hash.
  bool progress();

 private:
  struct Job {
    ChecksumOrder order;
    TimeNs deadline = 0;
    std::uint32_t next = 0;  // index of the item that is hashed next
  };
  ChecksumOutcome hash(const Job& job) const;

  const WorkerParts& parts_;
  const SendOutcome& send_;
  std::deque<Job> jobs_;
};

}  // namespace kvferry
