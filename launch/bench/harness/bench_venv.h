// The benchmark's Python virtual environment. matplotlib and the systems to compare with (--peers) are installed in it
// from PyPI when they are first needed. In a checkout the environment is build/bench-venv; elsewhere it is
// $XDG_CACHE_HOME/kvferry/bench-venv (~/.cache by default).
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "launch/bench/harness/programs.h"

namespace kvferry::bench {

/// Installs what is missing for "nixl", "mooncake", "ucx", "plot", "connector_lmcache", or "controller_" followed by
/// one of kControllerPeers. Calls `say` with a line for each step that takes a while. The environment variable PYTHON
/// names the interpreter that creates the virtual environment (python3 by default), and pip's own settings are
/// honoured. Failures: kInvalidArgument for another `what`, kUnavailable with the reason in one line, kCancelled.
void ensure_installed(const std::string& what, const Say& say);

/// Returns the command that runs a script with the virtual environment's Python. Before the command is run, the caller
/// must have called ensure_installed(), which writes the script.
Command script_command(const std::string& script, std::vector<std::string> words);

/// Writes all scripts and returns the path of one of them, for a Python outside the virtual environment. Failures:
/// kUnavailable if a file can't be written.
std::string script_path(const std::string& script);
/// Returns the folder in which LMCache is installed for vLLM's Python.
std::string beside_vllm_folder();

/// Runs a program to its end, without a time limit. Failures: kUnavailable, with the program's last line of stderr, if
/// it can't be started or its exit status is not 0; kCancelled.
void run_to_end(const Command& command);

/// Returns the folder of the libraries of the package libucx-cu13; empty if the package is not installed.
std::string newest_ucx_folder();

/// One of the Python programs of launch/bench/peers, which the build embeds in the binary.
struct Script {
  std::string_view name;
  std::string_view text;
};
std::span<const Script> scripts();

}  // namespace kvferry::bench
