// The far side of the benchmark: waits for a driver and runs workers for it. A driver's messages are checked, but there
// is no password: run a listener in a trusted network only, for as long as a measurement takes.
#pragma once

#include <string>

#include "launch/bench/harness/tcp.h"

namespace kvferry::bench {

/// Serves one driver after the other until the user's interrupt. With `is_child` it prints its port as a JSON line,
/// serves one driver and returns. kUnavailable: it can't listen at the address.
Result<void> run_listener(const HostPort& address, bool is_child);

}  // namespace kvferry::bench
