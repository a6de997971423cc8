// The benchmark's own virtual environment: peers and matplotlib, from PyPI when they are first asked for. In a checkout
// it is build/bench-venv, else $XDG_CACHE_HOME/kvferry/bench-venv (~/.cache by default).
#pragma once

#include <functional>
#include <string>

#include "launch/bench/harness/child_process.h"

namespace kvferry::bench {

/// "nixl", "mooncake", "ucx", "plot", "connector_lmcache", or "controller_" and one of the controller's peers. Installs
/// what is missing; `say` gets a line for each step that takes a while. PYTHON names the interpreter (python3); pip's
/// own settings are honoured. Errors: kUnavailable with the reason in one line, kCancelled.
Result<void> ensure_installed(const std::string& what, const std::function<void(const std::string&)>& say);

/// Python with one of the scripts; whoever runs it has made sure of the installation.
Command script_command(const std::string& script, std::vector<std::string> words);

/// Where a script lies, for another Python than the benchmark's own. kUnavailable: it can't be written.
Result<std::string> script_path(const std::string& script);
/// What vLLM's Python finds LMCache in.
std::string beside_vllm_folder();

/// Waits for a program's end, whatever it takes. kUnavailable with its last words, kCancelled.
Result<void> run_to_end(const Command& command);

/// Of libucx-cu13's libraries; empty where it is not installed.
std::string newest_ucx_folder();

}  // namespace kvferry::bench
