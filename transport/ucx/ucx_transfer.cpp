#include "transport/ucx/ucx_transfer.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "transport/base/check.h"
#include "transport/base/checksum.h"

namespace kvferry::ucx {
namespace {

constexpr std::uint32_t kMessagesPerPeerMax = 8;  // limit of one peer's unanswered messages, about 2 MiB together
// Background transfers fill only 1 / kBackgroundShare of operations_per_peer_max, so that urgent transfers wait less.
constexpr std::uint32_t kBackgroundShare = 8;

/// A posted get of a pull with checksums.
struct CheckedGet {
  UcxTransfer* transfer;
  LocalPiece piece;
};

}  // namespace

UcxTransfer::UcxTransfer(const UcxOptions& options, UcxPeer& peer, PendingMessages& pending, AcceptedTransfer accepted,
                         const LocalMemory& local_memory)
    : options_(options),
      peer_(peer),
      pending_messages_(pending),
      accepted_(std::move(accepted)),
      local_memory_(local_memory) {
  ++peer_.num_transfers;
}

UcxTransfer::~UcxTransfer() {
  KVFERRY_CHECK(num_posted_ == 0, "UCX transfer {} was dropped with {} operations running", accepted_.id, num_posted_);
  KVFERRY_CHECK(!verifier_.is_hashing(), "UCX transfer {} was dropped while a GPU reads its memory", accepted_.id);
  pending_messages_.remove(this);
  peer_.num_unanswered -= num_unanswered_;
  --peer_.num_transfers;
}

void UcxTransfer::advance(TimeNs now, UcpWorker& worker, const std::string& from) {
  if (verifier_.is_hashing() && !verify_on_device()) return;
  if (std::exchange(has_retired_, false)) {
    progressed_at_ = now;
    peer_.note_life(now);
  }
  if (may_post() && phase_ == Phase::kCopying) {
    if (mode_ == Mode::kUndecided) mode_ = choose_mode();
    if (mode_ == Mode::kPacked) {
      post_messages(worker, from);
    } else {
      post_operations();
    }
    if (may_post() && is_all_posted()) post_flush();
  }
  if (phase_ != Phase::kFlushing || num_posted_ > 0 || num_unanswered_ > 0 || peer_.is_failed() || !failure_.empty())
    return;
  if (cancelled_at_ != 0 || !verify_on_device() || !failure_.empty()) return;
  const bool is_to_notify = !accepted_.notification.empty() && !has_notified_ && !verifier_.has_corrupt();
  if (!is_to_notify) {
    phase_ = Phase::kDone;
  } else if (may_post()) {
    post_notification(worker, from);
  }
}

bool UcxTransfer::may_post() const {
  return failure_.empty() && cancelled_at_ == 0 && peer_.is_ready() && !peer_.is_draining();
}

UcxTransfer::Mode UcxTransfer::choose_mode() const {
  if (accepted_.remote.grant != 0) return Mode::kPacked;
  if (accepted_.remote.is_device || local_memory_.device != nullptr) return Mode::kOneSided;
  if (options_.packed_bytes_max == 0 || !peer_.prefers_packing() || accepted_.copies.empty()) return Mode::kOneSided;
  std::uint64_t bytes = 0;
  for (const CopyRange& copy : accepted_.copies) bytes += copy.bytes;
  return bytes / accepted_.copies.size() <= options_.packed_bytes_max ? Mode::kPacked : Mode::kOneSided;
}

bool UcxTransfer::is_over() const {
  if (num_posted_ > 0 || verifier_.is_hashing()) return false;
  if (peer_.is_failed()) return peer_.is_closed();  // UCX may touch the memory until a broken endpoint is closed
  return phase_ == Phase::kDone || cancelled_at_ != 0 || (!failure_.empty() && num_unanswered_ == 0);
}

void UcxTransfer::cancel(TimeNs now) {
  if (cancelled_at_ == 0) cancelled_at_ = now;
}

TimeNs UcxTransfer::stuck_deadline() const {
  if (cancelled_at_ == 0 || num_posted_ == 0 || peer_.is_failed()) return 0;
  return std::max(cancelled_at_, progressed_at_) + options_.stuck_ns;
}

ErrorCode UcxTransfer::code() const {
  if (phase_ == Phase::kDone) return !verifier_.has_corrupt() ? ErrorCode::kOk : ErrorCode::kCorrupt;
  if (cancelled_at_ != 0) return ErrorCode::kCancelled;
  return peer_.is_failed() ? ErrorCode::kPeerLost : failure_code_;
}

std::string UcxTransfer::what() const {
  const ErrorCode outcome = code();
  if (outcome == ErrorCode::kOk) return "";
  if (outcome == ErrorCode::kCorrupt) return verifier_.what();
  if (outcome == ErrorCode::kCancelled) return "this process cancelled the transfer";
  return outcome == ErrorCode::kPeerLost ? peer_.why() : failure_;
}

std::vector<std::uint32_t> UcxTransfer::corrupt_ranges() const {
  return code() == ErrorCode::kCorrupt ? verifier_.corrupt_ranges() : std::vector<std::uint32_t>{};
}

LocalPiece UcxTransfer::take_piece(std::uint64_t bytes_max) {
  const Piece piece = cursor_.take(accepted_.copies, bytes_max);
  if (piece.at == 0 && !is_pull() && is_hashed_here()) verifier_.compare_local(piece.copy);
  return {piece.copy, accepted_.local_base + accepted_.copies[piece.copy].local_offset + piece.at, piece.bytes};
}

void UcxTransfer::post_operations() {
  if (rkey_ == nullptr) {
    Result<RkeyPtr> rkey = peer_.rkey(accepted_.remote.rkey);
    if (!rkey) {
      failure_ = std::move(rkey.error().what);
      return;
    }
    rkey_ = std::move(*rkey);
  }
  const std::uint32_t share = accepted_.priority == Priority::kBackground ? kBackgroundShare : 1;
  const std::uint32_t posted_max = std::max(options_.operations_per_peer_max / share, 1U);
  const bool is_checked = is_pull() && is_hashed_here();
  while (!cursor_.is_at_end(accepted_.copies) && num_posted_ < options_.operations_per_transfer_max &&
         peer_.num_posted < posted_max && peer_.is_ready()) {
    const std::uint64_t remote = accepted_.remote.base + accepted_.copies[cursor_.copy()].remote_offset + cursor_.at();
    const LocalPiece piece = take_piece(options_.operation_bytes_max);
    if (piece.bytes == 0) {
      if (is_checked) arrived(piece);
      continue;
    }
    ucp_request_param_t param = request_param();
    if (!is_checked) {
      account(is_pull() ? api().ucp_get_nbx(peer_.ep(), piece.local, piece.bytes, remote, rkey_.get(), &param)
                        : api().ucp_put_nbx(peer_.ep(), piece.local, piece.bytes, remote, rkey_.get(), &param));
      continue;
    }
    auto get = std::make_unique<CheckedGet>(CheckedGet{this, piece});
    param.user_data = get.get();
    param.cb.send = [](void* request, ucs_status_t status, void* user_data) {
      api().ucp_request_free(request);
      const std::unique_ptr<CheckedGet> done(static_cast<CheckedGet*>(user_data));
      if (status == UCS_OK) done->transfer->arrived(done->piece);
      done->transfer->retire(status);
    };
    const auto posted = api().ucp_get_nbx(peer_.ep(), piece.local, piece.bytes, remote, rkey_.get(), &param);
    account(posted);
    if (UCS_PTR_IS_PTR(posted)) {
      static_cast<void>(get.release());
    } else if (posted == nullptr) {
      arrived(piece);
    }
  }
}

void UcxTransfer::post_messages(UcpWorker& worker, const std::string& from) {
  while (!cursor_.is_at_end(accepted_.copies) && peer_.num_unanswered < kMessagesPerPeerMax && peer_.is_ready()) {
    const bool is_first = cursor_.is_at_begin();
    BlocksMessage message{pending_messages_.next_token(),
                          is_pull(),
                          accepted_.remote.region,
                          accepted_.remote.grant,
                          {},
                          "",
                          "",
                          peer_.secret()};
    std::vector<LocalPiece> pieces;
    std::uint64_t bytes = 0;
    while (!cursor_.is_at_end(accepted_.copies) && pieces.size() < kMessageExtentsMax && bytes < kMessageBytesMax) {
      message.extents.push_back(accepted_.copies[cursor_.copy()].remote_offset + cursor_.at());
      pieces.push_back(take_piece(kMessageBytesMax - bytes));
      message.extents.push_back(pieces.back().bytes);
      bytes += pieces.back().bytes;
    }
    // A transfer's only message also carries the notification, unless a checksum is wrong or will be compared later.
    const bool is_checked_later = is_pull() && accepted_.has_checksums();
    if (is_first && is_all_posted() && !verifier_.has_corrupt() && !is_checked_later &&
        !accepted_.notification.empty()) {
      message.from = from;
      message.notification = accepted_.notification;
      has_notified_ = true;
    }
    std::string packed = begin_packed(message, is_pull() ? 0 : bytes);
    if (!is_pull()) {
      for (const LocalPiece& piece : pieces) packed.append(reinterpret_cast<const char*>(piece.local), piece.bytes);
    }
    pending_messages_.add(message.token, {this, std::move(pieces)});
    ++num_unanswered_;
    ++peer_.num_unanswered;
    if (const ucs_status_t status = worker.send(peer_.ep(), kBlocksAm, std::move(packed), true); status != UCS_OK)
      peer_.fail(describe_status("UCX refused to send a request to copy blocks", status));
  }
}

void UcxTransfer::on_answer(const std::vector<LocalPiece>& pieces, const BlocksAnswer& answer,
                            std::string_view payload) {
  --num_unanswered_;
  --peer_.num_unanswered;
  has_retired_ = true;
  if (answer.code != static_cast<std::int32_t>(ErrorCode::kOk)) {
    const bool is_refusal = answer.code == static_cast<std::int32_t>(ErrorCode::kRefused);
    failure_code_ = is_refusal ? ErrorCode::kRefused : ErrorCode::kInternal;
    failure_ = refusal_text(answer.what);
    return;
  }
  // If the transfer is cancelled, or its connection has failed, its memory must not be written.
  if (!is_pull() || cancelled_at_ != 0 || peer_.is_failed()) return;
  std::uint64_t bytes = 0;
  for (const LocalPiece& piece : pieces) bytes += piece.bytes;
  if (bytes != payload.size())
    return peer_.fail(fmt::format("the peer sent {} bytes where {} were requested", payload.size(), bytes));
  for (const LocalPiece& piece : pieces) {
    std::memcpy(piece.local, payload.data(), piece.bytes);
    payload.remove_prefix(piece.bytes);
    if (accepted_.has_checksums()) arrived(piece);
  }
}

void UcxTransfer::arrived(const LocalPiece& piece) {
  if (verifier_.has_arrived(piece.copy, piece.bytes)) verifier_.compare_local(piece.copy);
}

bool UcxTransfer::verify_on_device() {
  if (local_memory_.device == nullptr || !accepted_.has_checksums() || is_verified_on_device_) return true;
  const auto fail = [this](const Error& error) {
    failure_ = error.what;
    verifier_.drop_device();
    return is_verified_on_device_ = true;
  };
  if (!verifier_.is_hashing()) {
    if (Result<void> ok = verifier_.start_on_device(*local_memory_.device, local_memory_.stream); !ok)
      return fail(ok.error());
  }
  const Result<bool> is_done = verifier_.is_device_done();
  if (!is_done) return fail(is_done.error());
  if (!*is_done) return false;
  if (Result<void> ok = verifier_.compare_device(); !ok) return fail(ok.error());
  return is_verified_on_device_ = true;
}

void UcxTransfer::post_flush() {
  phase_ = Phase::kFlushing;
  // The bytes of a finished get have arrived. Those of a finished put may still be on their way until the flush ends.
  if (mode_ == Mode::kPacked || is_pull() || accepted_.copies.empty()) return;
  ucp_request_param_t param = request_param();
  param.op_attr_mask &= ~static_cast<std::uint32_t>(UCP_OP_ATTR_FIELD_MEMH);
  account(api().ucp_ep_flush_nbx(peer_.ep(), &param));
}

void UcxTransfer::post_notification(UcpWorker& worker, const std::string& from) {
  phase_ = Phase::kDone;
  std::string message = encode(NotificationMessage{from, accepted_.notification, peer_.secret()});
  if (const ucs_status_t status = worker.send(peer_.ep(), kNotificationAm, std::move(message), false); status != UCS_OK)
    peer_.fail(describe_status("UCX refused to send a notification", status));
}

void UcxTransfer::account(ucs_status_ptr_t posted) {
  if (UCS_PTR_IS_PTR(posted)) {
    ++num_posted_;
    ++peer_.num_posted;
  } else if (UCS_PTR_IS_ERR(posted)) {
    peer_.fail(describe_status("UCX refused to read, write or flush the peer's memory", UCS_PTR_STATUS(posted)));
  }
}

void UcxTransfer::retire(ucs_status_t status) {
  --num_posted_;
  --peer_.num_posted;
  has_retired_ = true;
  // An operation fails only on a broken connection. UCX may report that before it calls the endpoint's error handler.
  if (status != UCS_OK) peer_.fail(describe_status("UCX failed to read, write or flush the peer's memory", status));
}

ucp_request_param_t UcxTransfer::request_param() {
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMH;
  param.cb.send = [](void* request, ucs_status_t status, void* user_data) {
    api().ucp_request_free(request);
    static_cast<UcxTransfer*>(user_data)->retire(status);
  };
  param.user_data = this;
  param.memh = local_memory_.handle;
  if (local_memory_.type != UCS_MEMORY_TYPE_HOST) {
    param.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMORY_TYPE;
    param.memory_type = local_memory_.type;
  }
  return param;
}

}  // namespace kvferry::ucx
