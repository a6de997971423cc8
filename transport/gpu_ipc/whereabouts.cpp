#include "transport/gpu_ipc/whereabouts.h"

#include <filesystem>
#include <string_view>
#include <system_error>

namespace kvferry::gpu_ipc {
namespace {

std::string own_namespace(const char* kind) {
  std::error_code failure;
  return std::filesystem::read_symlink(std::filesystem::path("/proc/self/ns") / kind, failure).string();
}

bool is_part_of_a_gpu(std::string_view uuid) { return uuid.starts_with("MIG-"); }

/// Returns whether `a` and `b` differ and both are known, that is, not empty.
bool differ(const std::string& a, const std::string& b) { return !a.empty() && !b.empty() && a != b; }

}  // namespace

Whereabouts whereabouts_of(const Device& device) { return {device.uuid(), own_namespace("pid"), own_namespace("ipc")}; }

std::string likely_reason(const Whereabouts& own, const Whereabouts& peer) {
  std::string reasons;
  const auto add = [&](const std::string& reason) { reasons += (reasons.empty() ? "" : "; ") + reason; };
  if (differ(own.gpu, peer.gpu)) {
    add(fmt::format("this process has {}, the peer has {}", own.gpu, peer.gpu));
    if (is_part_of_a_gpu(own.gpu) || is_part_of_a_gpu(peer.gpu))
      add("CUDA IPC maps no memory between MIG instances of a GPU, nor between them and other GPUs");
  }
  const bool has_other_pids = differ(own.pid_namespace, peer.pid_namespace);
  const bool has_other_ipc = differ(own.ipc_namespace, peer.ipc_namespace);
  if (has_other_pids || has_other_ipc)
    add(
        fmt::format("the peer's container has another {} namespace: start both with --ipc=host --pid=host, or in one "
                    "container",
                    has_other_pids && has_other_ipc ? "PID and IPC"
                    : has_other_pids                ? "PID"
                                                    : "IPC"));
  return reasons.empty() ? "" : fmt::format(" ({})", reasons);
}

}  // namespace kvferry::gpu_ipc
