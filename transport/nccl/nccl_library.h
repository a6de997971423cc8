// NCCL itself, loaded when it is first wanted.
#pragma once

#include <memory>
#include <string>

#include "transport/nccl/communicators.h"

namespace kvferry::nccl {

/// `path`: of libnccl.so.2; empty: KVFERRY_NCCL_LIBRARY, or where the loader finds it.
/// kUnavailable: this build has no CUDA, or no such library is there, or it is too old.
Result<std::unique_ptr<Communicators>> open_nccl(const std::string& path);

}  // namespace kvferry::nccl
