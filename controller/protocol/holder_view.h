// A holder of looked-up chunks as the directory stores it.
#pragma once

#include <cstdint>
#include <span>

#include "controller/api/client.h"
#include "transport/base/clock.h"

namespace kvferry::controller {

/// A Holder without copies, and what the directory ranks it by.
struct HolderView {
  const NodeInfo* info = nullptr;
  std::uint32_t num_full_chunks = 0;
  std::span<const ChunkEntry> tails;
  Tier tier = Tier::kHost;
  bool confirmed = true;
  TimeNs heard_at = 0;
  bool is_leaving = false;
};

}  // namespace kvferry::controller
