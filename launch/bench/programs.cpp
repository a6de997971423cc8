#include "launch/bench/programs.h"

#include <unistd.h>

#include <algorithm>
#include <climits>
#include <string_view>

namespace kvferry::bench {

Command self_command(std::vector<std::string> words) {
  char path[PATH_MAX] = {};
  const ssize_t length = ::readlink("/proc/self/exe", path, sizeof(path) - 1);
  words.insert(words.begin(), length > 0 ? path : "kvferry");
  return {std::move(words), {}};
}

Result<Command> worker_command(const WorkerSpec& spec) {
  constexpr std::string_view kBuiltIn[] = {"kvferry", "memcpy", "cma", "socket"};
  if (std::find(std::begin(kBuiltIn), std::end(kBuiltIn), spec.engine) != std::end(kBuiltIn))
    return self_command({"bench", "worker"});
  return Error{ErrorCode::kInvalidArgument, fmt::format("there is no engine '{}'", spec.engine)};
}

}  // namespace kvferry::bench
