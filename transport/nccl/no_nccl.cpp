#include "transport/nccl/nccl_library.h"

namespace kvferry::nccl {

Result<std::unique_ptr<Communicators>> open_nccl(const std::string&) {
  return Error{ErrorCode::kUnavailable, "this build has no CUDA, which NCCL needs"};
}

}  // namespace kvferry::nccl
