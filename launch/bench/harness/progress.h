// The progress of a long command on stderr: a bar that redraws itself if stderr is a terminal, otherwise a line for
// each step.
#pragma once

#include <cstddef>
#include <string>

#include "transport/base/clock.h"

namespace kvferry::bench {

class Progress {
 public:
  explicit Progress(std::size_t num_steps);
  ~Progress() { make_room(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// Throws a Failure kCancelled after a Ctrl-C or SIGTERM that catch_interrupts() has caught.
  void begin_step(const std::string& what);
  void end_step() { ++num_done_; }
  /// Prints a line above the bar.
  void say(const std::string& line);
  /// Removes the bar, so that the caller can print.
  void make_room();

 private:
  void draw();

  const bool is_terminal_;
  const std::size_t num_steps_;
  const TimeNs started_;
  std::size_t num_done_ = 0;
  std::string what_;
};

}  // namespace kvferry::bench
