// The lower limit of a remote lookup: servers that return each message, over the same sockets and with the same waits.
#pragma once

#include <string>

#include "transport/base/result.h"

namespace kvferry::bench {

/// Each starts a thread that serves until the process ends, and returns its endpoint.
Result<std::string> start_zmq_echo();
Result<std::string> start_stream_echo(const std::string& path);

}  // namespace kvferry::bench
