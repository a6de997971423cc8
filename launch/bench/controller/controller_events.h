// How fast the controller takes in what vLLM tells of its KV cache: batches as vLLM encodes them, decoded and indexed.
#pragma once

#include <cstdint>

#include "transport/base/result.h"

namespace kvferry::bench {

/// Medians; hashes a second on one core.
struct EngineEventRates {
  double stored = 0;          // events of 32 hashes with their tokens, integers for hashes
  double stored_bytes = 0;    // the same with 32 bytes for a hash
  double removed = 0;         // as vLLM tells it: an event for each hash
  double decoded = 0;         // what stored costs without the index
  double bytes_per_hash = 0;  // of the index
};

/// With `num_hashes` in the index, on 64 engines, 1.5 of them for a hash.
/// kCorrupt: the index does not hold what it was told.
Result<EngineEventRates> measure_engine_events(std::uint64_t num_hashes, std::uint64_t repeat);

}  // namespace kvferry::bench
