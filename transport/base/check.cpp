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
  const std::string message = fmt::format("kvferry: broken promise: {} ({}) [{}:{}]", reason, condition, file, line);
  if (CheckHandler handler = g_handler.load()) handler(message);
  std::fprintf(stderr, "%s\n", message.c_str());
  std::abort();
}

}  // namespace kvferry
