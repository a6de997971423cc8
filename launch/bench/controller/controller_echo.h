// The floor under a remote look-up: what comes back as it went, over the same sockets and waited for in the same way.
#pragma once

#include <string>

#include "transport/base/result.h"

namespace kvferry::bench {

/// Each starts a thread that serves until the process ends, and returns where.
Result<std::string> start_zmq_echo();
Result<std::string> start_stream_echo(const std::string& path);

}  // namespace kvferry::bench
