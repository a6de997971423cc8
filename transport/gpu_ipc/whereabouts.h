// Where a process and its GPU are, as far as CUDA's IPC depends on it. Private to this folder.
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

/// Returns where this process is.
Whereabouts whereabouts_of(const Device& device);

/// Returns what may be the reason why a process can't map the memory of a peer on its host, in brackets after a space.
/// Returns an empty text if nothing is known to stand between them.
std::string likely_reason(const Whereabouts& own, const Whereabouts& peer);

}  // namespace kvferry::gpu_ipc
