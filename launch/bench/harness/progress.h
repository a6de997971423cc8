// How far a long command is: a bar that redraws itself on a terminal, else a line a step. On stderr.
#pragma once

#include <cstddef>
#include <string>

#include "transport/base/clock.h"

namespace kvferry::bench {

class Progress {
 public:
  explicit Progress(std::size_t num_steps);
  ~Progress() { clear(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void begin_step(const std::string& what);
  void end_step() { ++num_done_; }
  /// A line of its own that stays.
  void say(const std::string& line);
  /// So that somebody else may write a line.
  void make_room() { clear(); }

 private:
  void clear();
  void draw();

  const bool is_terminal_;
  const std::size_t num_steps_;
  const TimeNs started_;
  std::size_t num_done_ = 0;
  std::string what_;
};

}  // namespace kvferry::bench
