#include "transport/nccl/channel.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "transport/base/check.h"
#include "transport/base/log.h"

namespace kvferry::nccl {
namespace {

constexpr TimeNs kSettleNs = kSecond;  // after an abort, a device whose events fail for this long counts as dead

/// The send or receive operations of one NCCL group. Sender and receiver compute the same sizes of these operations
/// from the sizes of the piece's parts.
struct Layout {
  std::vector<std::span<std::byte>> operations;
  // pairs of (place in the staging buffer, part that is staged there)
  std::vector<std::pair<std::byte*, std::span<std::byte>>> staged;
};

Layout lay_out(const PieceTransfer& piece, std::byte* staging) {
  Layout layout;
  const auto is_small = [&](const auto& part) { return part.size() <= piece.packed_bytes_max; };
  const bool packs = std::count_if(piece.parts.begin(), piece.parts.end(), is_small) > 1;
  std::byte* end = staging;
  for (const std::span<std::byte>& part : piece.parts) {
    if (!packs || !is_small(part)) continue;
    layout.staged.emplace_back(end, part);
    end += part.size();
  }
  if (end != staging) layout.operations.push_back({staging, end});
  for (const std::span<std::byte>& part : piece.parts) {
    if (packs && is_small(part)) continue;
    layout.operations.push_back(piece.is_drained ? std::span<std::byte>(end, part.size()) : part);
    end += piece.is_drained ? part.size() : 0;
  }
  KVFERRY_CHECK(end <= staging + kPieceBytesMax,
                "a piece of an NCCL transfer has {} bytes, more than the staging buffer of {} bytes", end - staging,
                kPieceBytesMax);
  return layout;
}

}  // namespace

Result<std::unique_ptr<Channel>> Channel::open(Device& device, StagingPool& staging, Communicators& communicators,
                                               const std::string& id, int rank, Role role) {
  std::unique_ptr<Channel> channel(new Channel(device, staging, role));
  channel->stream_ = KVFERRY_TRY(device.make_stream());
  channel->communicator_ = KVFERRY_TRY(communicators.begin(id, rank));
  channel->allocation_ = staging.take();
  return channel;
}

Channel::~Channel() {
  KVFERRY_CHECK(communicator_ == nullptr || is_quiet_,
                "an NCCL communicator was dropped while it may still read or write memory");
  if (stream_ != nullptr) device_.drop_stream(stream_);
  if (staging_ != nullptr) pool_.give_back(staging_);
}

bool Channel::has_staging() {
  if (!allocation_.valid() || allocation_.wait_for(std::chrono::seconds(0)) != std::future_status::ready)
    return staging_ != nullptr;
  Result<std::byte*> buffer = allocation_.get();
  if (!buffer) fail(buffer.error());
  if (buffer) staging_ = *buffer;
  return static_cast<bool>(buffer);
}

bool Channel::withdraw(std::uint64_t token) {
  const auto first = queue_.begin() + (is_posting_ ? 1 : 0);
  const auto found =
      std::find_if(first, queue_.end(), [&](const PieceTransfer& piece) { return piece.token == token; });
  if (found == queue_.end()) return false;
  queue_.erase(found);
  return true;
}

void Channel::advance(TimeNs now, std::vector<Report>& reports) {
  if (is_aborting_) return settle(now);
  if (is_failed()) return;
  if (progressed_at_ == 0) progressed_at_ = now;
  while (!is_failed() && (is_posting_ || !queue_.empty() || !is_set_up_)) {
    if (!has_staging()) break;
    const Communicator::State state = communicator_->state();
    if (state == Communicator::State::kBusy) break;
    if (state != Communicator::State::kReady) {
      fail({ErrorCode::kPeerLost, communicator_->why()});
      break;
    }
    if (!std::exchange(is_set_up_, true)) progressed_at_ = now;
    if (std::exchange(is_posting_, false)) {
      end_posting();
    } else if (queue_.empty()) {
      break;
    } else {
      if (!is_busy()) progressed_at_ = now;
      if (!begin(queue_.front(), reports)) queue_.pop_front();
    }
  }
  reap(now, reports);
}

bool Channel::begin(PieceTransfer& piece, std::vector<Report>& reports) {
  const Layout layout = lay_out(piece, staging_);
  copies_.clear();
  for (const auto& [buffer, part] : layout.staged) {
    if (role_ == Role::kSender) {
      copies_.push_back({buffer, part.data(), part.size()});
    } else if (!piece.is_drained) {
      copies_.push_back({part.data(), buffer, part.size()});
    }
  }
  if (role_ == Role::kSender && !copies_.empty()) {
    if (Result<void> ok = device_.copy(copies_, stream_); !ok) {
      reports.push_back({false, piece.token, std::move(ok)});
      return false;
    }
  }
  Result<void> ok = role_ == Role::kSender ? communicator_->send(layout.operations, stream_)
                                           : communicator_->receive(layout.operations, stream_);
  if (!ok) fail(ok.error());
  is_posting_ = true;
  if (ok && role_ == Role::kSender) reports.push_back({true, piece.token, {}});
  return true;
}

void Channel::end_posting() {
  InFlight piece{queue_.front().token, {}, {}};
  queue_.pop_front();
  if (role_ == Role::kReceiver && !copies_.empty()) piece.outcome = device_.copy(copies_, stream_);
  Result<DeviceEvent> end = DeviceEvent::record(device_, stream_);
  if (!end) return fail(end.error());  // without an event, it is unknown when the piece's accesses to memory end
  piece.end = std::move(*end);
  in_flight_.push_back(std::move(piece));
}

void Channel::reap(TimeNs now, std::vector<Report>& reports) {
  while (!is_failed() && !in_flight_.empty()) {
    InFlight& piece = in_flight_.front();
    const Result<bool> is_reached = piece.end.is_reached();
    if (!is_reached) return fail(is_reached.error());
    if (!*is_reached) break;
    progressed_at_ = now;
    reports.push_back({false, piece.token, std::move(piece.outcome)});
    in_flight_.pop_front();
  }
  // The state matters only while there is work: an idle communicator may fail too, for example when the peer ends.
  if (!is_failed() && !in_flight_.empty() && communicator_->state() == Communicator::State::kFailed)
    fail({ErrorCode::kPeerLost, communicator_->why()});
}

void Channel::abort() {
  if (std::exchange(is_aborting_, true)) return;
  queue_.clear();
  communicator_->abort();
}

void Channel::settle(TimeNs now) {
  has_staging();
  if (is_quiet_ || allocation_.valid() || communicator_->state() != Communicator::State::kAborted) return;
  Result<bool> is_reached = last_ == nullptr ? Result<bool>(false) : last_->is_reached();
  if (last_ == nullptr) {
    Result<DeviceEvent> end = DeviceEvent::record(device_, stream_);
    if (end) {
      last_ = std::make_unique<DeviceEvent>(std::move(*end));
    } else {
      is_reached = std::move(end).error();
    }
  }
  if (is_reached) {
    settle_until_ = 0;
  } else if (settle_until_ == 0) {
    settle_until_ = now + kSettleNs;
  } else if (now >= settle_until_) {
    log().error(
        "nccl: {} is treated as dead and transfers with it end, because its CUDA events have failed for {} ms since a "
        "communicator was aborted: {}",
        device_.describe(), kSettleNs / kMillisecond, is_reached.error().what);
    is_quiet_ = true;
  }
  if (!is_reached || !*is_reached) return;
  in_flight_.clear();
  last_ = nullptr;
  is_quiet_ = true;
}

}  // namespace kvferry::nccl
