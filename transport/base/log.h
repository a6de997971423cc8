// The log of all C++ components, written with spdlog: "DATE TIME kvferry[PID] LEVEL MESSAGE". The environment variable
// KVFERRY_LOG sets the lowest level that is logged (default: info).
#pragma once

#include <spdlog/spdlog.h>

namespace kvferry {

/// The process-wide logger, made on first use. It writes to stderr, so that stdout has only the output of a command.
spdlog::logger& log();

}  // namespace kvferry
