// `kvferry bench transfer`: the driver, the far side, and the worker processes that each of the two starts.
#pragma once

#include "launch/bench/transfer/options.h"

namespace kvferry::bench {

/// Prints progress on stderr and the table on stdout; writes the JSON and the plot that the options name. Returns an
/// error if kvferry could not be measured, if there is no listener, if the JSON can't be written, or after the user's
/// interrupt. A failure of any other engine is only a warning.
Result<void> run_driver(const TransferOptions& options);

/// Runs the far side, which waits for a driver and runs workers for it. The messages of a driver are checked, but there
/// is no password, so run a listener only in a trusted network and only while you measure. Serves one driver after the
/// other until the user's interrupt. If `is_child` is true, prints the listener's port as a JSON line, serves one
/// driver and returns. Errors: kUnavailable if listening at the address failed; if `is_child` is true, also the failure
/// of the driver's connection.
Result<void> run_listener(const HostPort& address, bool is_child);

/// Executes the commands that worker.h lists, which arrive on stdin, and answers on stdout, until stdin ends or a
/// command fails. The error of a failed command is sent to the driver. Returns an error only if reading stdin failed.
Result<void> run_worker();

}  // namespace kvferry::bench
