// What CUDA's IPC between two processes depends on: their GPUs and their namespaces. Private to this folder.
#pragma once

#include <string>

#include "transport/base/device.h"
#include "transport/base/wire.h"

namespace kvferry::gpu_ipc {

struct Whereabouts {
  std::string gpu;            // Device::uuid()
  std::string pid_namespace;  // as /proc/self/ns shows it, such as "pid:[4026531836]"
  std::string ipc_namespace;
  KVFERRY_FIELDS(gpu, pid_namespace, ipc_namespace);
};

/// Returns the GPU and the namespaces of this process.
Whereabouts whereabouts_of(const Device& device);

/// Returns likely reasons why a process can't map the GPU memory of a peer on its host, as " (REASONS)", or an empty
/// text if their GPUs and namespaces are equal or unknown.
std::string likely_reason(const Whereabouts& own, const Whereabouts& peer);

}  // namespace kvferry::gpu_ipc
