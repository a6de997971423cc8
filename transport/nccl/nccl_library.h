// NCCL itself, loaded when it is first wanted.
#pragma once

#include <memory>
#include <string>

#include "transport/nccl/communicators.h"

namespace kvferry::nccl {

/// `path`: of libnccl.so.2; empty: KVFERRY_NCCL_LIBRARY, or where the loader finds it. For the memory of this device.
/// kUnavailable: this build has no CUDA, or there is no such library or it is too old, and what to install.
Result<std::unique_ptr<Communicators>> open_nccl(const std::string& path, Device& device);

/// "NCCL 2.32.3". Needs no GPU. Errors: as above.
Result<std::string> find_nccl(const std::string& path);

}  // namespace kvferry::nccl
