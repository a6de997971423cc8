// The far half of the benchmark: waits for a driver and runs workers for it. No word of a driver is trusted, but there
// is no password either: a listener is for a network of friends, for as long as a measurement takes.
#pragma once

#include <string>

#include "launch/bench/harness/tcp.h"

namespace kvferry::bench {

/// Serves one driver after the other until the user's interrupt; with `is_child` it prints its address as a JSON line,
/// serves one, and ends.
/// kUnavailable: can't listen there.
Result<void> run_listener(const HostPort& address, bool is_child);

}  // namespace kvferry::bench
