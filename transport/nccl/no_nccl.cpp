#include "transport/nccl/communicators.h"

namespace kvferry::nccl {
namespace {

Error has_none() {
  return {
      ErrorCode::kUnavailable,
      "this build of kvferry has no NCCL; build it with -DKVFERRY_CUDA=ON and the header nccl.h of nvidia-nccl-cu13"};
}

}  // namespace

Result<std::unique_ptr<Communicators>> open_nccl(const std::string&, Device&) { return has_none(); }
Result<std::string> find_nccl(const std::string&) { return has_none(); }

}  // namespace kvferry::nccl
