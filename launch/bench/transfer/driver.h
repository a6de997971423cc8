// The whole of `kvferry bench transfer` from the driver's side: the order of the measurements, and their results.
#pragma once

#include "launch/bench/transfer/options.h"

namespace kvferry::bench {

/// Prints progress on stderr and the table on stdout; writes the JSON and the plot that the options name.
/// Errors: kvferry could not be measured, no listener, the user's interrupt. Any other engine that fails is a warning.
Result<void> run_driver(const TransferOptions& options);

}  // namespace kvferry::bench
