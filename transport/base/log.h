// One log line format for all parts: "kvferry[<part>] message". spdlog underneath, level from KVFERRY_LOG (default
// info).
#pragma once

#include <spdlog/spdlog.h>

namespace kvferry {

/// The process-wide logger, made on first use; writes to stderr so that stdout stays a command's own output.
spdlog::logger& log();

}  // namespace kvferry
