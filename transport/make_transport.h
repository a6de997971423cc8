// How to get a Transport that crosses processes, without seeing the library that carries it.
#pragma once

#include <cstdint>
#include <memory>

#include "transport/base/clock.h"
#include "transport/base/result.h"
#include "transport/transport.h"

namespace kvferry {

/// The defaults suit a worker node; UCX itself is set by its own variables (UCX_TLS, UCX_NET_DEVICES).
struct UcxOptions {
  std::uint32_t transfers_max = 1024;              // accepted and not yet polled; more is kFull
  std::uint32_t operations_per_transfer_max = 32;  // posted to UCX at a time
  std::uint32_t operations_per_peer_max = 64;      // the same, all transfers with one peer together
  std::uint64_t operation_bytes_max = 1 << 20;     // longer ranges are cut, so that cancel() need not wait for them
  TimeNs spin_ns = 20'000;                         // the progress thread looks this long for work before it sleeps
  TimeNs stuck_ns = kSecond;  // a cancelled transfer without any progress for this long takes its connection down
};

/// Host memory over UCP. Starts the progress thread.
/// Errors: kUnavailable: UCX found no usable transport here; kInvalidArgument: an option is zero or negative.
Result<std::unique_ptr<Transport>> make_ucx_transport(const UcxOptions& options);

}  // namespace kvferry
