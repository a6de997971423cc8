// NCCL itself, loaded at run time.
#pragma once

#include <memory>
#include <string>

#include "transport/nccl/communicators.h"

namespace kvferry::nccl {

/// Loads NCCL for the memory of `device`. `path`: of libnccl.so.2; empty: KVFERRY_NCCL_LIBRARY, or the loader's search.
/// kUnavailable: this build has no CUDA, or the library is missing or too old; the message says what to install.
Result<std::unique_ptr<Communicators>> open_nccl(const std::string& path, Device& device);

/// Returns the version, like "NCCL 2.32.3". Needs no GPU. Errors: as above.
Result<std::string> find_nccl(const std::string& path);

}  // namespace kvferry::nccl
