#include "transport/ucx/ucx_transfer.h"

#include <algorithm>
#include <utility>

#include "transport/base/check.h"

namespace kvferry::ucx {

UcxTransfer::UcxTransfer(const UcxOptions& options, UcxPeer& peer, AcceptedTransfer accepted, ucp_mem_h local_memory)
    : options_(options), peer_(peer), accepted_(std::move(accepted)), local_memory_(local_memory) {
  ++peer_.num_transfers;
}

UcxTransfer::~UcxTransfer() {
  KVFERRY_CHECK(num_posted_ == 0, "transfer {} dropped with {} operations posted", accepted_.id, num_posted_);
  --peer_.num_transfers;
}

void UcxTransfer::advance(TimeNs now, const std::string& own_address) {
  if (std::exchange(has_retired_, false)) progressed_at_ = now;
  if (may_post() && phase_ == Phase::kCopying) post_copies();
  if (may_post() && phase_ == Phase::kFlushing && num_posted_ == 0 && !accepted_.notification.empty())
    post_notification(own_address);
  const bool is_last_phase =
      phase_ == Phase::kNotifying || (phase_ == Phase::kFlushing && accepted_.notification.empty());
  if (is_last_phase && num_posted_ == 0 && !peer_.is_failed()) phase_ = Phase::kDone;
}

bool UcxTransfer::may_post() const {
  return failure_.empty() && cancelled_at_ == 0 && peer_.is_ready() && !peer_.is_draining();
}

bool UcxTransfer::is_over() const {
  if (num_posted_ > 0) return false;
  // A broken endpoint is closed first: only then is UCX known to be through with the memory.
  if (peer_.is_failed()) return peer_.is_closed();
  return phase_ == Phase::kDone || !failure_.empty() || cancelled_at_ != 0;
}

void UcxTransfer::cancel(TimeNs now) {
  if (cancelled_at_ == 0) cancelled_at_ = now;
}

TimeNs UcxTransfer::stuck_deadline() const {
  if (cancelled_at_ == 0 || num_posted_ == 0 || peer_.is_failed()) return 0;
  return std::max(cancelled_at_, progressed_at_) + options_.stuck_ns;
}

ErrorCode UcxTransfer::code() const {
  if (phase_ == Phase::kDone) return ErrorCode::kOk;
  if (cancelled_at_ != 0) return ErrorCode::kCancelled;
  return peer_.is_failed() ? ErrorCode::kPeerLost : ErrorCode::kInternal;
}

std::string UcxTransfer::what() const {
  switch (code()) {
    case ErrorCode::kOk:
      return "";
    case ErrorCode::kCancelled:
      return "cancelled";
    case ErrorCode::kPeerLost:
      return peer_.why();
    default:
      return failure_;
  }
}

void UcxTransfer::post_copies() {
  if (rkey_ == nullptr) {
    Result<RkeyPtr> rkey = peer_.rkey(accepted_.remote.rkey);
    if (!rkey) {
      failure_ = std::move(rkey.error().what);
      return;
    }
    rkey_ = std::move(*rkey);
  }
  const ucp_request_param_t param = request_param();
  while (next_copy_ < accepted_.copies.size() && num_posted_ < options_.operations_per_transfer_max &&
         peer_.num_posted < options_.operations_per_peer_max && peer_.is_ready()) {
    const CopyRange& copy = accepted_.copies[next_copy_];
    const std::uint64_t bytes = std::min(copy.bytes - next_copy_done_bytes_, options_.operation_bytes_max);
    std::byte* local = accepted_.local_base + copy.local_offset + next_copy_done_bytes_;
    const std::uint64_t remote = accepted_.remote.base + copy.remote_offset + next_copy_done_bytes_;
    account(accepted_.direction == Direction::kPull
                ? ucp_get_nbx(peer_.ep(), local, bytes, remote, rkey_.get(), &param)
                : ucp_put_nbx(peer_.ep(), local, bytes, remote, rkey_.get(), &param));
    next_copy_done_bytes_ += bytes;
    if (next_copy_done_bytes_ == copy.bytes) {
      ++next_copy_;
      next_copy_done_bytes_ = 0;
    }
  }
  if (next_copy_ == accepted_.copies.size() && peer_.is_ready()) post_flush();
}

void UcxTransfer::post_flush() {
  phase_ = Phase::kFlushing;
  // A finished get has its bytes here; a finished put has only left. The flush ends when all puts are visible there.
  if (accepted_.direction == Direction::kPull || accepted_.copies.empty()) return;
  ucp_request_param_t param = request_param();
  param.op_attr_mask &= ~static_cast<std::uint32_t>(UCP_OP_ATTR_FIELD_MEMH);
  account(ucp_ep_flush_nbx(peer_.ep(), &param));
}

void UcxTransfer::post_notification(const std::string& own_address) {
  phase_ = Phase::kNotifying;
  message_ = encode(NotificationMessage{own_address, accepted_.notification});
  ucp_request_param_t param = request_param();
  param.op_attr_mask &= ~static_cast<std::uint32_t>(UCP_OP_ATTR_FIELD_MEMH);
  param.op_attr_mask |= UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = UCP_AM_SEND_FLAG_EAGER;
  account(ucp_am_send_nbx(peer_.ep(), kNotificationAm, nullptr, 0, message_.data(), message_.size(), &param));
}

void UcxTransfer::account(ucs_status_ptr_t posted) {
  if (UCS_PTR_IS_PTR(posted)) {
    ++num_posted_;
    ++peer_.num_posted;
  } else if (UCS_PTR_IS_ERR(posted)) {
    peer_.fail(story_of("the connection refused an operation", UCS_PTR_STATUS(posted)));
  }
}

void UcxTransfer::retire(ucs_status_t status) {
  --num_posted_;
  --peer_.num_posted;
  has_retired_ = true;
  // UCX fails operations before it calls the endpoint's error handler, and none of them fails on a sound connection.
  if (status != UCS_OK) peer_.fail(story_of("the connection failed an operation", status));
}

ucp_request_param_t UcxTransfer::request_param() {
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMH;
  param.cb.send = [](void* request, ucs_status_t status, void* user_data) {
    ucp_request_free(request);
    static_cast<UcxTransfer*>(user_data)->retire(status);
  };
  param.user_data = this;
  param.memh = local_memory_;
  return param;
}

}  // namespace kvferry::ucx
