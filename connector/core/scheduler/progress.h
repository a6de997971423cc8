// The fields of a request that nearly every step uses. The records of all requests lie side by side, apart from the
// requests' other fields, which with hundreds of running requests no longer fit into the CPU cache.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

namespace kvferry {

struct RequestState;

struct Progress {
  RequestState* request = nullptr;  // the request of this record; nullptr: the record is free
  std::uint32_t generation = 0;     // number of requests that had this record before
  std::uint32_t computed = 0;       // number of tokens whose KV exists once the planned steps are done
  std::uint32_t saved = 0;  // full chunks that end at or before this token were in the pool, or their save was tried
  /// Number of computed tokens when vLLM last freed blocks that lie before a sliding window.
  std::uint32_t window_end = 0;
  std::uint32_t step_end = 0;        // number of computed tokens after the last step
  std::uint32_t computes_until = 0;  // number of computed tokens at which kComputed is recorded; 0: never
  bool running = false;              // true if the request has blocks and does not wait for an asynchronous load
  bool cacheable = false;            // as in NewRequest; may become false, for example after a failed load
  bool handoff = false;              // as in NewRequest: a decode worker will read the prompt
};

/// Names a request without its id. A handle whose request has ended names no request, even if a later request has the
/// same record.
struct RequestHandle {
  Progress* progress = nullptr;
  std::uint32_t generation = 0;
};

/// The records of all requests. A record keeps its address, and is used again when its request has ended.
class ProgressTable {
 public:
  Progress& add() {
    if (free_.empty()) return records_.emplace_back();
    Progress& record = *free_.back();
    free_.pop_back();
    return record;
  }
  void remove(Progress& record) {
    const std::uint32_t generation = record.generation + 1;
    record = {};
    record.generation = generation;
    free_.push_back(&record);
  }
  /// Returns nullptr if the handle's request has ended.
  static Progress* find(const RequestHandle& handle) {
    const bool is_current = handle.progress != nullptr && handle.progress->generation == handle.generation;
    return is_current ? handle.progress : nullptr;
  }

 private:
  std::deque<Progress> records_;
  std::vector<Progress*> free_;
};

}  // namespace kvferry
