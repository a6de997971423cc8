#include <algorithm>
#include <string_view>

#include "launch/bench/harness/bench_venv.h"
#include "launch/bench/transfer/worker.h"

namespace kvferry::bench {
namespace {

Failure unknown(const WorkerSpec& spec) {
  return Failure({ErrorCode::kInvalidArgument,
                  fmt::format("the benchmark has no engine '{}' with setting '{}'; allowed: kvferry, memcpy, cma and "
                              "socket, and nixl, mooncake and ucx with setting default or best",
                              spec.engine, spec.setting)});
}

/// Returns the environment variables that configure UCX. With path tcp, they restrict UCX to TCP. For engine ucx with
/// the setting "best", they have the values that were fastest.
std::vector<std::string> ucx_environment(const WorkerSpec& spec) {
  if (spec.path != "tcp") {
    if (spec.engine == "ucx" && spec.setting == "best") return {"UCX_TLS=posix,self"};
    return {};
  }
  std::vector<std::string> environment{"UCX_TLS=tcp"};
  if (spec.engine == "ucx" && spec.setting == "best")
    environment.insert(environment.end(), {"UCX_TCP_TX_SEG_SIZE=256k", "UCX_TCP_RX_SEG_SIZE=256k"});
  return environment;
}

}  // namespace

Command worker_command(const WorkerSpec& spec) {
  constexpr std::string_view kBuiltIn[] = {"kvferry", "memcpy", "cma", "socket"};
  if (std::find(std::begin(kBuiltIn), std::end(kBuiltIn), spec.engine) != std::end(kBuiltIn))
    return self_command({"bench", "worker"});
  if (spec.setting != "default" && spec.setting != "best") throw unknown(spec);
  Command command;
  if (spec.engine == "ucx") {
    const std::string folder = newest_ucx_folder();
    if (folder.empty())
      throw Failure(
          {ErrorCode::kUnavailable,
           "the package libucx-cu13 is not in the benchmark's virtual environment (the folder bench-venv); remove that "
           "folder, so that the benchmark installs the package again"});
    command = self_command({"bench", "worker"});
    command.environment.push_back("KVFERRY_UCX_LIBRARY=" + folder + "/libucp.so.0");
  } else if (spec.engine == "nixl" || spec.engine == "mooncake") {
    command = script_command(spec.engine + "_worker.py", {});
  } else {
    throw unknown(spec);
  }
  const std::vector<std::string> more = ucx_environment(spec);
  command.environment.insert(command.environment.end(), more.begin(), more.end());
  return command;
}

}  // namespace kvferry::bench
