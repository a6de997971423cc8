#include "transport/base/check.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>

namespace kvferry {
namespace {
std::atomic<CheckHandler> g_handler{nullptr};
}

CheckHandler set_check_handler(CheckHandler handler) { return g_handler.exchange(handler); }

void check_failed(const char* condition, const char* file, int line, const std::string& reason) {
  const std::string message = fmt::format("kvferry: failed check: {} ({}) [{}:{}]", reason, condition, file, line);
  if (CheckHandler handler = g_handler.load()) handler(message);
  // The message is printed last, because supervisors and tests show the last line of an aborted process.
  std::fprintf(stderr,
               "kvferry: this is an internal error of kvferry, which ends this process. Please report it as an issue "
               "of kvferry, unless the next line says that memory or file descriptors are short here. Include that "
               "line, the log before it, the output of kvferry --version, and vLLM's version and command line.\n%s\n",
               message.c_str());
  std::abort();
}

}  // namespace kvferry
