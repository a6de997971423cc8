#include "launch/bench/harness/progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>

#include "launch/bench/harness/failure.h"
#include "launch/bench/harness/interrupt.h"

namespace kvferry::bench {
namespace {

constexpr std::size_t kBarWidth = 24;

}  // namespace

Progress::Progress(std::size_t num_steps)
    : is_terminal_(::isatty(STDERR_FILENO) == 1), num_steps_(num_steps), started_(SteadyClock().now()) {}

void Progress::begin_step(const std::string& what) {
  if (is_interrupted()) throw Failure(interrupted());
  what_ = what;
  if (is_terminal_)
    draw();
  else
    fmt::print(stderr, "[{}/{}] {}\n", num_done_ + 1, num_steps_, what_);
}

void Progress::say(const std::string& line) {
  make_room();
  fmt::print(stderr, "{}\n", line);
  if (is_terminal_) draw();
}

void Progress::make_room() {
  if (is_terminal_) fmt::print(stderr, "\r\033[K");
}

void Progress::draw() {
  const std::size_t filled = num_steps_ == 0 ? kBarWidth : kBarWidth * num_done_ / num_steps_;
  std::string left;
  if (num_done_ > 0) {
    const double seconds = static_cast<double>(SteadyClock().now() - started_) * 1e-9;
    left = fmt::format(", {:.0f} s left",
                       seconds / static_cast<double>(num_done_) * static_cast<double>(num_steps_ - num_done_));
  }
  fmt::print(stderr, "\r\033[K[{:#<{}}{:.<{}}] {}/{}{}  {}", "", filled, "", kBarWidth - filled, num_done_, num_steps_,
             left, what_);
}

}  // namespace kvferry::bench
