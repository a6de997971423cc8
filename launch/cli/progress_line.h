// The progress bar of commands that wait.
#pragma once

#include <fmt/format.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <string_view>

namespace kvferry::cli {

/// A progress bar on stderr. Prints nothing if stderr is not a terminal.
class ProgressLine {
 public:
  void show(std::uint64_t done, std::uint64_t all, std::string_view what) {
    if (!is_terminal_) return;
    constexpr std::uint64_t kWidth = 30;
    const std::uint64_t filled = all == 0 ? kWidth : done * kWidth / all;
    fmt::print(stderr, "\r[{:#<{}}{:.<{}}] {}/{} {}\x1b[K", "", filled, "", kWidth - filled, done, all, what);
    has_shown_ = true;
  }
  ~ProgressLine() {
    if (has_shown_) fmt::print(stderr, "\n");
  }

 private:
  bool is_terminal_ = ::isatty(STDERR_FILENO) != 0;
  bool has_shown_ = false;
};

}  // namespace kvferry::cli
