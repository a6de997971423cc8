// The commands of the `kvferry` binary. Each function adds a command to the command line and returns the function that
// executes this command. That function is called only if the user gave the command.
//
// The exit status is 0 if the command succeeded, 1 after a failure (for example, a port is in use or the controller
// can't be reached), and 2 if the user's input is wrong. With 1 and 2, the last line on stderr is "kvferry: " followed
// by the reason.
#pragma once

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <charconv>
#include <functional>
#include <string>
#include <type_traits>

#include "transport/base/result.h"

namespace kvferry::cli {

/// Executes a command. The error kInvalidArgument becomes exit status 2, any other error 1.
using Run = std::function<Result<void>()>;

/// Returns a check of an option's value, which must be a number from `least` to `most`. CLI::Range is not used, because
/// its errors print a bound of type double with six decimals, however many digits precede them.
template <class Number>
CLI::Validator number_between(Number least, Number most) {
  const auto what_is_wrong = [least, most](const std::string& value) {
    Number number{};
    const char* const end = value.data() + value.size();
    const auto [stop, failure] = std::from_chars(value.data(), end, number);
    if (failure == std::errc() && stop == end && number >= least && number <= most) return std::string();
    return fmt::format("'{}' is not a {}number from {} to {}", value, std::is_integral_v<Number> ? "whole " : "", least,
                       most);
  };
  return CLI::Validator(what_is_wrong, fmt::format("[{} to {}]", least, most));
}

Run add_bench_command(CLI::App& app);
Run add_clear_command(CLI::App& app);
Run add_controller_command(CLI::App& app);
Run add_doctor_command(CLI::App& app);
Run add_drain_command(CLI::App& app);
Run add_explain_command(CLI::App& app);
Run add_keygen_command(CLI::App& app);
Run add_purge_command(CLI::App& app);
Run add_quota_command(CLI::App& app);
Run add_status_command(CLI::App& app);
Run add_token_command(CLI::App& app);
Run add_top_command(CLI::App& app);

}  // namespace kvferry::cli
