// The commands of the `kvferry` binary. Each function adds a command to the command line and returns the function that
// main() calls if the user gave that command.
//
// The exit status is 0 if the command succeeded, 1 after a failure (port in use, controller unreachable), and 2 if the
// user's input is wrong. With 1 and 2 the command prints exactly one line "kvferry: ..." on stderr.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>

#include "transport/base/result.h"

namespace kvferry::cli {

/// Executes a command. The error kInvalidArgument becomes exit status 2, any other error 1.
using Run = std::function<Result<void>()>;

Run add_bench_command(CLI::App& app);
Run add_clear_command(CLI::App& app);
Run add_controller_command(CLI::App& app);
Run add_doctor_command(CLI::App& app);
Run add_drain_command(CLI::App& app);
Run add_explain_command(CLI::App& app);
Run add_keygen_command(CLI::App& app);
Run add_quota_command(CLI::App& app);
Run add_status_command(CLI::App& app);
Run add_token_command(CLI::App& app);

}  // namespace kvferry::cli
