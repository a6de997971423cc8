// The whole benchmark from one side: who is measured where, in which order, and what is told.
#pragma once

#include "launch/bench/transfer/options.h"

namespace kvferry::bench {

/// Prints progress on stderr and the table on stdout; writes the JSON and the plot that were asked for.
/// Errors: kvferry could not be measured, no listener, the user's interrupt. A peer or a limit that fails is a warning.
Result<void> run_driver(const TransferOptions& options);

}  // namespace kvferry::bench
