#include "transport/ucx/ucx_transfer.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "transport/base/check.h"
#include "transport/base/checksum.h"

namespace kvferry::ucx {
namespace {

constexpr std::uint32_t kMessagesPerPeerMax = 8;  // asked and not answered; 2 MiB
// Background operations, long as they may be, get this share of what a peer may have posted: an urgent one waits for
// it.
constexpr std::uint32_t kBackgroundShare = 8;

/// A get of a checked pull.
struct CheckedGet {
  UcxTransfer* transfer;
  Piece piece;
};

}  // namespace

UcxTransfer::UcxTransfer(const UcxOptions& options, UcxPeer& peer, AskedBook& asked, AcceptedTransfer accepted,
                         const LocalMemory& local_memory)
    : options_(options), peer_(peer), asked_(asked), accepted_(std::move(accepted)), local_memory_(local_memory) {
  ++peer_.num_transfers;
}

UcxTransfer::~UcxTransfer() {
  KVFERRY_CHECK(num_posted_ == 0, "transfer {} dropped with {} operations posted", accepted_.id, num_posted_);
  KVFERRY_CHECK(hashes_ == nullptr, "transfer {} dropped while a GPU reads its memory", accepted_.id);
  asked_.forget(this);
  peer_.num_asked -= num_asked_;
  --peer_.num_transfers;
}

void UcxTransfer::feed(FedCopies fed) {
  accepted_.copies.insert(accepted_.copies.end(), fed.copies.begin(), fed.copies.end());
  accepted_.checksums.insert(accepted_.checksums.end(), fed.checksums.begin(), fed.checksums.end());
  accepted_.is_complete = fed.is_last;
}

void UcxTransfer::advance(TimeNs now, UcpWorker& worker, const std::string& own_address) {
  if (hashes_ != nullptr && !check_device()) return;
  if (std::exchange(has_retired_, false)) {
    progressed_at_ = now;
    peer_.heard(now);
  }
  if (may_post() && phase_ == Phase::kCopying) {
    if (mode_ == Mode::kUndecided) mode_ = choose_mode();
    if (mode_ == Mode::kPacked) {
      post_messages(worker, own_address);
    } else {
      post_operations();
    }
    if (may_post() && is_all_posted()) post_flush();
  }
  if (phase_ != Phase::kFlushing || num_posted_ > 0 || num_asked_ > 0 || peer_.is_failed() || !failure_.empty()) return;
  if (cancelled_at_ != 0 || !check_device() || !failure_.empty()) return;
  const bool is_to_announce = !accepted_.notification.empty() && !has_announced_ && corrupt_.empty();
  if (!is_to_announce) {
    phase_ = Phase::kDone;
  } else if (may_post()) {
    post_notification(worker, own_address);
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
  if (num_posted_ > 0 || hashes_ != nullptr) return false;
  // A broken endpoint is closed first: only then is UCX known to be through with the memory.
  if (peer_.is_failed()) return peer_.is_closed();
  return phase_ == Phase::kDone || cancelled_at_ != 0 || (!failure_.empty() && num_asked_ == 0);
}

void UcxTransfer::cancel(TimeNs now) {
  if (cancelled_at_ == 0) cancelled_at_ = now;
}

TimeNs UcxTransfer::stuck_deadline() const {
  if (cancelled_at_ == 0 || num_posted_ == 0 || peer_.is_failed()) return 0;
  return std::max(cancelled_at_, progressed_at_) + options_.stuck_ns;
}

ErrorCode UcxTransfer::code() const {
  if (phase_ == Phase::kDone) return corrupt_.empty() ? ErrorCode::kOk : ErrorCode::kCorrupt;
  if (cancelled_at_ != 0) return ErrorCode::kCancelled;
  return peer_.is_failed() ? ErrorCode::kPeerLost : failure_code_;
}

std::string UcxTransfer::what() const {
  switch (code()) {
    case ErrorCode::kOk:
      return "";
    case ErrorCode::kCorrupt:
      return fmt::format("the bytes of {} ranges differ from their checksums", corrupt_.size());
    case ErrorCode::kCancelled:
      return "cancelled";
    case ErrorCode::kPeerLost:
      return peer_.why();
    default:
      return failure_;
  }
}

std::vector<std::uint32_t> UcxTransfer::corrupt_ranges() const {
  if (code() != ErrorCode::kCorrupt) return {};
  std::vector<std::uint32_t> sorted = corrupt_;
  std::sort(sorted.begin(), sorted.end());
  return sorted;
}

Piece UcxTransfer::take_piece(std::uint64_t bytes_max) {
  const CopyRange& copy = accepted_.copies[next_copy_];
  const bool is_first = next_copy_done_bytes_ == 0;
  const Piece piece{next_copy_, accepted_.local_base + copy.local_offset + next_copy_done_bytes_,
                    std::min(copy.bytes - next_copy_done_bytes_, bytes_max)};
  if (is_first && !accepted_.checksums.empty() && local_memory_.device == nullptr) {
    if (is_pull()) {
      missing_bytes_.resize(accepted_.copies.size());
      missing_bytes_[next_copy_] = copy.bytes;
    } else {
      check(next_copy_);
    }
  }
  next_copy_done_bytes_ += piece.bytes;
  if (next_copy_done_bytes_ == copy.bytes) {
    ++next_copy_;
    next_copy_done_bytes_ = 0;
  }
  return piece;
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
  const bool is_checked = is_pull() && !accepted_.checksums.empty() && local_memory_.device == nullptr;
  while (next_copy_ < accepted_.copies.size() && num_posted_ < options_.operations_per_transfer_max &&
         peer_.num_posted < posted_max && peer_.is_ready()) {
    const std::uint64_t remote =
        accepted_.remote.base + accepted_.copies[next_copy_].remote_offset + next_copy_done_bytes_;
    const Piece piece = take_piece(options_.operation_bytes_max);
    if (piece.bytes == 0) {
      if (is_checked) arrived(piece);
      continue;
    }
    ucp_request_param_t param = request_param();
    if (!is_checked) {
      account(is_pull() ? ucp_get_nbx(peer_.ep(), piece.local, piece.bytes, remote, rkey_.get(), &param)
                        : ucp_put_nbx(peer_.ep(), piece.local, piece.bytes, remote, rkey_.get(), &param));
      continue;
    }
    auto get = std::make_unique<CheckedGet>(CheckedGet{this, piece});
    param.user_data = get.get();
    param.cb.send = [](void* request, ucs_status_t status, void* user_data) {
      ucp_request_free(request);
      const std::unique_ptr<CheckedGet> done(static_cast<CheckedGet*>(user_data));
      if (status == UCS_OK) done->transfer->arrived(done->piece);
      done->transfer->retire(status);
    };
    const ucs_status_ptr_t posted = ucp_get_nbx(peer_.ep(), piece.local, piece.bytes, remote, rkey_.get(), &param);
    account(posted);
    if (UCS_PTR_IS_PTR(posted)) {
      static_cast<void>(get.release());
    } else if (posted == nullptr) {
      arrived(piece);
    }
  }
}

void UcxTransfer::post_messages(UcpWorker& worker, const std::string& own_address) {
  while (next_copy_ < accepted_.copies.size() && peer_.num_asked < kMessagesPerPeerMax && peer_.is_ready()) {
    const bool is_first = next_copy_ == 0 && next_copy_done_bytes_ == 0;
    BlocksMessage message{asked_.next_token(), is_pull(), accepted_.remote.region, accepted_.remote.grant, {}, "", ""};
    std::vector<Piece> pieces;
    std::uint64_t bytes = 0;
    while (next_copy_ < accepted_.copies.size() && pieces.size() < kMessageExtentsMax && bytes < kMessageBytesMax) {
      message.extents.push_back(accepted_.copies[next_copy_].remote_offset + next_copy_done_bytes_);
      pieces.push_back(take_piece(kMessageBytesMax - bytes));
      message.extents.push_back(pieces.back().bytes);
      bytes += pieces.back().bytes;
    }
    // One message that is all of it needs no second one for the notification.
    const bool is_checked_later = is_pull() && !accepted_.checksums.empty();
    if (is_first && is_all_posted() && corrupt_.empty() && !is_checked_later && !accepted_.notification.empty()) {
      message.from = own_address;
      message.notification = accepted_.notification;
      has_announced_ = true;
    }
    std::string packed = begin_packed(message, is_pull() ? 0 : bytes);
    if (!is_pull()) {
      for (const Piece& piece : pieces) packed.append(reinterpret_cast<const char*>(piece.local), piece.bytes);
    }
    asked_.add(message.token, {this, std::move(pieces)});
    ++num_asked_;
    ++peer_.num_asked;
    if (const ucs_status_t status = worker.send(peer_.ep(), kBlocksAm, std::move(packed), true); status != UCS_OK)
      peer_.fail(describe_status("the connection refused a message", status));
  }
}

void UcxTransfer::on_answer(const std::vector<Piece>& pieces, const BlocksAnswer& answer, std::string_view payload) {
  --num_asked_;
  --peer_.num_asked;
  has_retired_ = true;
  if (answer.code != static_cast<std::int32_t>(ErrorCode::kOk)) {
    const bool is_refusal = answer.code == static_cast<std::int32_t>(ErrorCode::kRefused);
    failure_code_ = is_refusal ? ErrorCode::kRefused : ErrorCode::kInternal;
    failure_ = answer.what.empty() ? "the peer refused" : answer.what;
    return;
  }
  // Whoever waits to be cancelled or closed wants no more bytes.
  if (!is_pull() || cancelled_at_ != 0 || peer_.is_failed()) return;
  std::uint64_t bytes = 0;
  for (const Piece& piece : pieces) bytes += piece.bytes;
  if (bytes != payload.size()) return peer_.fail("it answered with another number of bytes than it was asked for");
  for (const Piece& piece : pieces) {
    std::memcpy(piece.local, payload.data(), piece.bytes);
    payload.remove_prefix(piece.bytes);
    if (!accepted_.checksums.empty()) arrived(piece);
  }
}

void UcxTransfer::arrived(const Piece& piece) {
  missing_bytes_[piece.copy] -= piece.bytes;
  if (missing_bytes_[piece.copy] == 0) check(piece.copy);
}

void UcxTransfer::check(std::size_t copy) {
  const CopyRange& range = accepted_.copies[copy];
  if (chunk_checksum({accepted_.local_base + range.local_offset, range.bytes}) != accepted_.checksums[copy])
    corrupt_.push_back(static_cast<std::uint32_t>(copy));
}

bool UcxTransfer::check_device() {
  if (local_memory_.device == nullptr || accepted_.checksums.empty() || is_device_checked_) return true;
  const auto fail = [this](const Error& error) {
    failure_ = error.what;
    hashes_.reset();
    return is_device_checked_ = true;
  };
  if (hashes_ == nullptr) {
    std::vector<std::span<const std::byte>> ranges;
    for (const CopyRange& copy : accepted_.copies)
      ranges.emplace_back(accepted_.local_base + copy.local_offset, copy.bytes);
    Result<std::unique_ptr<Device::Checksums>> started = local_memory_.device->checksums(ranges, local_memory_.stream);
    if (!started) return fail(started.error());
    hashes_ = std::move(*started);
  }
  const Result<bool> is_done = hashes_->is_done();
  if (!is_done) return fail(is_done.error());
  if (!*is_done) return false;
  const Result<std::vector<std::uint64_t>> found = hashes_->take();
  if (!found) return fail(found.error());
  for (std::size_t copy = 0; copy < found->size(); ++copy) {
    if ((*found)[copy] != accepted_.checksums[copy]) corrupt_.push_back(static_cast<std::uint32_t>(copy));
  }
  hashes_.reset();
  return is_device_checked_ = true;
}

void UcxTransfer::post_flush() {
  phase_ = Phase::kFlushing;
  // A finished get has its bytes here; a finished put has only left. The flush ends when all puts are visible there.
  if (mode_ == Mode::kPacked || is_pull() || accepted_.copies.empty()) return;
  ucp_request_param_t param = request_param();
  param.op_attr_mask &= ~static_cast<std::uint32_t>(UCP_OP_ATTR_FIELD_MEMH);
  account(ucp_ep_flush_nbx(peer_.ep(), &param));
}

void UcxTransfer::post_notification(UcpWorker& worker, const std::string& own_address) {
  phase_ = Phase::kDone;
  std::string message = encode(NotificationMessage{own_address, accepted_.notification});
  if (const ucs_status_t status = worker.send(peer_.ep(), kNotificationAm, std::move(message), false); status != UCS_OK)
    peer_.fail(describe_status("the connection refused a message", status));
}

void UcxTransfer::account(ucs_status_ptr_t posted) {
  if (UCS_PTR_IS_PTR(posted)) {
    ++num_posted_;
    ++peer_.num_posted;
  } else if (UCS_PTR_IS_ERR(posted)) {
    peer_.fail(describe_status("the connection refused an operation", UCS_PTR_STATUS(posted)));
  }
}

void UcxTransfer::retire(ucs_status_t status) {
  --num_posted_;
  --peer_.num_posted;
  has_retired_ = true;
  // UCX fails operations before it calls the endpoint's error handler, and none of them fails on a sound connection.
  if (status != UCS_OK) peer_.fail(describe_status("the connection failed an operation", status));
}

ucp_request_param_t UcxTransfer::request_param() {
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMH;
  param.cb.send = [](void* request, ucs_status_t status, void* user_data) {
    ucp_request_free(request);
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
