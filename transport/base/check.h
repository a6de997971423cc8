// KVFERRY_CHECK asserts what the code can't go on without: invariants of kvferry's own code, and in a few places enough
// memory, a free file descriptor or the success of a library call. It is on in release builds too. Other failures are
// returned as a Result (result.h).
#pragma once

#include <fmt/format.h>

#include <string>

namespace kvferry {

/// Receives the whole message when a check fails. Tests install a handler that throws. If a handler returns, the
/// process aborts.
using CheckHandler = void (*)(const std::string& message);

/// Installs `handler` and returns the previous one. nullptr restores the default: print to stderr and abort.
CheckHandler set_check_handler(CheckHandler handler);

[[noreturn]] void check_failed(const char* condition, const char* file, int line, const std::string& reason);

}  // namespace kvferry

#define KVFERRY_CHECK(condition, ...)                                                    \
  do {                                                                                   \
    if (!(condition)) [[unlikely]]                                                       \
      ::kvferry::check_failed(#condition, __FILE__, __LINE__, fmt::format(__VA_ARGS__)); \
  } while (false)
