#include "launch/bench/harness/interrupt.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>

namespace kvferry::bench {
namespace {

volatile sig_atomic_t g_interrupted = 0;

extern "C" void on_interrupt(int) {
  g_interrupted = 1;
  ::alarm(3);
}

}  // namespace

void catch_interrupts() {
  struct sigaction action {};  // no SA_RESTART: a blocking call returns
  action.sa_handler = on_interrupt;
  for (const int number : {SIGINT, SIGTERM}) ::sigaction(number, &action, nullptr);
}

bool is_interrupted() { return g_interrupted != 0; }

Deadline::Deadline(TimeNs timeout_ns) : end_(SteadyClock().now() + timeout_ns) {}

Result<void> Deadline::check(const char* what) const {
  if (is_interrupted()) return Error{ErrorCode::kCancelled, "interrupted"};
  if (left_ns() == 0) return Error{ErrorCode::kTimeout, fmt::format("{} did not come in time", what)};
  return {};
}

TimeNs Deadline::left_ns() const { return std::max<TimeNs>(0, end_ - SteadyClock().now()); }

}  // namespace kvferry::bench
