// The command `kvferry top`.
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/signalfd.h>
#include <termios.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <memory>
#include <optional>
#include <string_view>
#include <system_error>
#include <vector>

#include "launch/cli/commands.h"
#include "launch/cli/controller_settings.h"
#include "launch/cli/top/node_rows.h"
#include "transport/base/owned_fd.h"

namespace kvferry::cli {
namespace {

using Time = std::chrono::steady_clock;
constexpr std::int64_t kFrameMs = 1000;
constexpr std::int64_t kAskMs = 800;  // a controller that does not answer must not delay keys and signals for long
constexpr std::size_t kPlainWidth = 80;

struct TopFlags {
  SettingFlags controller;
  std::string sort = "name";
  bool once = false, as_json = false;
};

/// The terminal while `kvferry top` draws on it: it shows the alternate screen, without a cursor, and does not echo
/// keys. close() and the destructor restore the terminal.
class Screen {
 public:
  Screen() { open(); }
  ~Screen() { close(); }
  Screen(const Screen&) = delete;
  Screen& operator=(const Screen&) = delete;

  void open() {
    has_settings_ = ::tcgetattr(STDIN_FILENO, &settings_) == 0;
    if (has_settings_) {
      termios quiet = settings_;
      quiet.c_lflag &= ~static_cast<tcflag_t>(ECHO | ICANON);
      ::tcsetattr(STDIN_FILENO, TCSANOW, &quiet);
    }
    write("\x1b[?1049h\x1b[?25l\x1b[?7l");
  }
  void close() {
    write("\x1b[?7h\x1b[?25h\x1b[?1049l");
    if (has_settings_) ::tcsetattr(STDIN_FILENO, TCSANOW, &settings_);
  }
  /// Returns false if the text can't be written, since the terminal is gone.
  static bool write(std::string_view text) {
    return std::fwrite(text.data(), 1, text.size(), stdout) == text.size() && std::fflush(stdout) == 0;
  }
  static winsize size() {
    winsize found{};
    if (::ioctl(STDOUT_FILENO, TIOCGWINSZ, &found) != 0 || found.ws_col == 0) found = {24, kPlainWidth, 0, 0};
    return found;
  }

 private:
  termios settings_{};
  bool has_settings_ = false;
};

struct Frame {
  controller::Status status;
  std::string endpoint;
  std::string problem;  // why the last query failed and left `status` unchanged; empty: it succeeded
  Time::time_point asked_at{};
};

std::string colour_of(std::string_view line) {
  if (line.find(" lost ") != std::string_view::npos && line.find(" nodes, ") == std::string_view::npos) return "31";
  for (const std::string_view word : {" stale ", " silent ", " draining "})
    if (line.find(word) != std::string_view::npos) return "33";
  return line.starts_with("NODE ") || line == "last failures" ? "1" : "";
}

std::vector<std::string> lines_of(const Frame& frame, const std::string& sort, std::size_t width) {
  std::vector<NodeRow> rows = node_rows(frame.status);
  sort_rows(rows, sort);
  return top_lines(frame.status, rows, frame.endpoint, width);
}

bool draw(const Frame& frame, const std::string& sort) {
  const winsize size = Screen::size();
  std::vector<std::string> lines = lines_of(frame, sort, size.ws_col);
  if (!frame.problem.empty()) {
    const auto old_for = std::chrono::duration_cast<std::chrono::milliseconds>(Time::now() - frame.asked_at).count();
    lines[2] = fmt::format("no answer for {}: {}", age_text(static_cast<std::uint64_t>(old_for)), frame.problem)
                   .substr(0, size.ws_col);
  }
  if (lines.size() > size.ws_row) {
    const std::size_t num_left_out = lines.size() - size.ws_row + 1;
    lines.resize(size.ws_row - 1U);
    lines.push_back(fmt::format("and {} more lines; `kvferry top --once` prints all", num_left_out));
  }
  std::string text = "\x1b[H";
  for (std::size_t i = 0; i < lines.size(); ++i) {
    const std::string colour = i == 2 ? "31" : i < 2 ? "" : colour_of(lines[i]);
    text += (colour.empty() ? lines[i] : fmt::format("\x1b[{}m{}\x1b[0m", colour, lines[i])) + "\x1b[K";
    if (i + 1 < lines.size()) text += "\r\n";
  }
  return Screen::write(text + "\x1b[J");
}

/// Draws a new frame about once a second until the user types q, a signal ends the command, or the terminal is gone.
/// Errors: kUnavailable if signalfd() fails.
Result<void> run_screen(const TopFlags& flags, Frame frame, const std::optional<net::ClusterKey>& key) {
  sigset_t signals;
  sigemptyset(&signals);
  for (const int one : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGWINCH, SIGTSTP, SIGCONT}) sigaddset(&signals, one);
  ::pthread_sigmask(SIG_BLOCK, &signals, nullptr);  // none of these signals ends this process while it draws
  const OwnedFd received(::signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!received)
    return Error{ErrorCode::kUnavailable,
                 fmt::format("can't watch for signals, which the screen needs, because signalfd() failed: {}; use "
                             "--once, or raise the limit on open files (ulimit -n) if it is reached",
                             std::generic_category().message(errno))};
  const int keys = ::isatty(STDIN_FILENO) != 0 ? STDIN_FILENO : -1;
  Screen screen;
  for (;;) {
    if (!draw(frame, flags.sort)) return {};
    const auto next = Time::now() + std::chrono::milliseconds(kFrameMs);
    for (bool waits = true; waits;) {
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(next - Time::now()).count();
      pollfd items[] = {{received.get(), POLLIN, 0}, {keys, POLLIN, 0}};
      waits = left > 0 && ::poll(items, 2, static_cast<int>(left)) > 0;
      signalfd_siginfo info{};
      while (::read(received.get(), &info, sizeof info) == sizeof info) {
        const auto number = static_cast<int>(info.ssi_signo);
        if (number == SIGTSTP) {
          screen.close();
          ::raise(SIGSTOP);
          screen.open();
        } else if (number != SIGWINCH && number != SIGCONT) {
          return {};
        }
        if (!draw(frame, flags.sort)) return {};
      }
      char typed = 0;
      if (waits && (items[1].revents & POLLIN) != 0 && (::read(STDIN_FILENO, &typed, 1) != 1 || typed == 'q'))
        return {};
      if (waits && (items[1].revents & (POLLHUP | POLLERR)) != 0) return {};
    }
    Result<controller::Status> status = controller::fetch_status(frame.endpoint, kAskMs, key);
    frame.problem = status ? "" : status.error().what;
    if (status) {
      frame.status = std::move(*status);
      frame.asked_at = Time::now();
    }
  }
}

Result<void> run(const TopFlags& flags) {
  const auto [endpoint, key] = KVFERRY_TRY(controller_of(flags.controller));
  const bool is_plain = flags.once || flags.as_json;
  if (!is_plain && ::isatty(STDOUT_FILENO) == 0)
    return Error{ErrorCode::kInvalidArgument,
                 "the output is no terminal, so the screen can't be drawn; use --once or --json"};
  Frame frame{KVFERRY_TRY(controller::fetch_status(endpoint, kControllerTimeoutMs, key)), endpoint, "", Time::now()};
  if (!is_plain) return run_screen(flags, std::move(frame), key);
  if (flags.as_json) {
    std::vector<NodeRow> rows = node_rows(frame.status);
    sort_rows(rows, flags.sort);
    fmt::print("{}\n", rows_json(rows).dump(2));
  } else {
    for (const std::string& line : lines_of(frame, flags.sort, kPlainWidth)) fmt::print("{}\n", line);
  }
  return {};
}

}  // namespace

Run add_top_command(CLI::App& app) {
  auto flags = std::make_shared<TopFlags>();
  CLI::App* command = app.add_subcommand(
      "top",
      "Show nodes, their pools, hits, transfers and failures on the whole screen, refreshed every second; q ends it");
  add_controller_option(*command, flags->controller);
  command->add_option("--sort", flags->sort, "What the nodes are sorted by")
      ->capture_default_str()
      ->check(CLI::IsMember(std::vector<std::string>(std::begin(kSortKeys), std::end(kSortKeys))));
  command->add_flag("--once", flags->once, "Print one frame of 80 columns as plain text and end");
  command->add_flag("--json", flags->as_json, "Print the nodes of one frame as JSON and end");
  return [flags] { return run(*flags); };
}

}  // namespace kvferry::cli
