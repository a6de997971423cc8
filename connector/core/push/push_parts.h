// The parts of the scheduler core that PushSender and PushReceiver share.
#pragma once

#include <vector>

#include "connector/core/actions.h"
#include "connector/core/core_config.h"
#include "connector/core/counters.h"
#include "connector/core/flight_recorder.h"
#include "connector/core/pool/chunk_pool.h"
#include "connector/core/pool/provenance.h"
#include "transport/base/secrets/secret_numbers.h"

namespace kvferry {

struct PushParts {
  const CoreConfig& config;
  ChunkPool& pool;
  std::vector<Action>& actions;
  CoreCounters& counters;
  SecretNumbers& numbers;
  FlightRecorder& recorder;
  const Provenance& provenance;
  const TimeNs& now;  // SchedulerCore::now_
};

}  // namespace kvferry
