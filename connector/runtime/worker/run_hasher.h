// Private to the pull thread: hashes the runs of this rank's chunks that a reader of another shape will pull, a chunk
// at a time, so that pulls are not kept waiting.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <span>
#include <string>

#include "connector/runtime/links/node_wire.h"
#include "connector/runtime/links/zmq_link.h"
#include "transport/base/clock.h"

namespace kvferry {

class RunHasher {
 public:
  using IsReadable = std::function<bool(ChunkRef)>;
  /// `pool`: all slots, of `slot_bytes` bytes each.
  RunHasher(std::span<const std::byte> pool, std::uint64_t slot_bytes, std::uint64_t bytes_per_token,
            IsReadable is_readable)
      : pool_(pool), slot_bytes_(slot_bytes), bytes_per_token_(bytes_per_token), is_readable_(std::move(is_readable)) {}

  void take(const std::string& sender, const Envelope& envelope, TimeNs now);
  /// Hashes one chunk and tells it; false: there was none to hash.
  bool step(ServerSocket& socket, TimeNs now);

 private:
  struct Job {
    ChecksumOrder order;
    std::string reply_to;
    std::uint32_t next = 0;  // item
    TimeNs deadline = 0;
  };
  ChecksumOutcome hash(const Job& job) const;

  std::span<const std::byte> pool_;
  std::uint64_t slot_bytes_;
  std::uint64_t bytes_per_token_;
  IsReadable is_readable_;
  std::deque<Job> jobs_;
};

}  // namespace kvferry
