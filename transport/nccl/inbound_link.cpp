#include "transport/nccl/inbound_link.h"

#include <algorithm>
#include <utility>

#include "transport/base/log.h"
#include "transport/copy_plan.h"

namespace kvferry::nccl {
namespace {

Error success() { return Error{ErrorCode::kOk, ""}; }

/// Returns the lowest offset and the highest end of all extents, or an error if no correct peer would send these
/// extents.
Result<std::pair<std::uint64_t, std::uint64_t>> span_of(const Ask& ask) {
  const bool is_hash = ask.purpose == static_cast<std::uint8_t>(Purpose::kHash);
  if (ask.extents.empty() || ask.extents.size() % 2 != 0 || ask.extents.size() > 2 * kExtentsMax)
    return protocol_error(
        fmt::format("the peer's request has {} numbers for its ranges of bytes; allowed: an offset and a length for "
                    "each of 1 to {} ranges",
                    ask.extents.size(), kExtentsMax));
  std::uint64_t first = UINT64_MAX;
  std::uint64_t end = 0;
  std::uint64_t total = 0;
  for (std::size_t index = 0; index < ask.extents.size(); index += 2) {
    const std::uint64_t offset = ask.extents[index];
    const std::uint64_t bytes = ask.extents[index + 1];
    if (bytes == 0 || !is_inside(offset, bytes, UINT64_MAX))
      return protocol_error(
          fmt::format("the peer requested a range of {} bytes at offset {}; a range must have bytes and end below 2^64",
                      bytes, offset));
    if (!is_hash && bytes > kPieceBytesMax - total)
      return protocol_error(fmt::format("the peer requested more than the allowed {} bytes at once", kPieceBytesMax));
    total += bytes;
    first = std::min(first, offset);
    end = std::max(end, offset + bytes);
  }
  return std::pair(first, end);
}

}  // namespace

Result<void> InboundLink::on_message(const Message& message) {
  switch (message.kind) {
    case Kind::kPing:
      return {};
    case Kind::kOpen: {
      return on_open(KVFERRY_TRY(decode<Open>(message.body, "offer of an NCCL communicator by the peer")));
    }
    case Kind::kAsk: {
      return on_ask(KVFERRY_TRY(decode<Ask>(message.body, "request of the peer")));
    }
    case Kind::kNotify: {
      on_notify(KVFERRY_TRY(decode<Notify>(message.body, "notification of the peer")));
      return {};
    }
    default:
      return protocol_error(
          fmt::format("the peer sent a message of kind {}; allowed: {} (communicator), {} (request), {} "
                      "(notification), {} (ping) and {} (end)",
                      static_cast<int>(message.kind), static_cast<int>(Kind::kOpen), static_cast<int>(Kind::kAsk),
                      static_cast<int>(Kind::kNotify), static_cast<int>(Kind::kPing), static_cast<int>(Kind::kBye)));
  }
}

Result<void> InboundLink::on_open(const Open& open) {
  if (channel(open.is_pull) != nullptr)
    return protocol_error(
        fmt::format("the peer opened the NCCL communicator for {} twice", open.is_pull ? "pulls" : "pushes"));
  return open_channel(open.is_pull, open.id, 1, open.is_pull ? Role::kSender : Role::kReceiver);
}

Result<void> InboundLink::on_ask(const Ask& ask) {
  if (ask.purpose > static_cast<std::uint8_t>(Purpose::kHash))
    return protocol_error(
        fmt::format("the peer's request has the unknown purpose {}; allowed: 0 (pull), 1 (push) and {} (checksums)",
                    ask.purpose, static_cast<int>(Purpose::kHash)));
  const auto purpose = static_cast<Purpose>(ask.purpose);
  if (served_.size() >= kServedMax || served_.contains(ask.token))
    return protocol_error(
        fmt::format("the peer sent request {} twice, or has more than {} unanswered requests", ask.token, kServedMax));
  Channel* const through = channel(purpose == Purpose::kPull);
  if (through == nullptr)
    return protocol_error(
        fmt::format("the peer made request {} before it opened an NCCL communicator for it", ask.token));
  const auto span = KVFERRY_TRY(span_of(ask));

  const RegionId region{ask.region};
  const GrantId grant{ask.grant};
  // A kHash verifies the pushes before it, so it needs the same right to write.
  Result<std::byte*> memory = context_.transfer_table.begin_access(region, grant, span.first, span.second - span.first,
                                                                   purpose != Purpose::kPull, member_);
  Served served;
  served.purpose = purpose;
  PieceTransfer piece{ask.token, {}, ask.packed_bytes_max, !memory};
  for (std::size_t index = 0; index < ask.extents.size(); index += 2) {
    std::byte* const base = memory ? *memory + (ask.extents[index] - span.first) : nullptr;
    piece.parts.emplace_back(base, ask.extents[index + 1]);
  }
  if (memory) {
    served.access = MemoryAccess(context_.transfer_table, region, grant);
  } else if (purpose == Purpose::kPush) {
    served.refusal = memory.error();
  } else {
    answer(ask.token, memory.error());
    return {};
  }
  if (purpose == Purpose::kHash) {
    hash(ask.token, std::move(served), piece.parts);
    return {};
  }
  served_.emplace(ask.token, std::move(served));
  through->post(std::move(piece));
  return {};
}

void InboundLink::hash(std::uint64_t token, Served served, const std::vector<std::span<std::byte>>& parts) {
  const std::vector<std::span<const std::byte>> ranges(parts.begin(), parts.end());
  auto checksums = context_.device.checksums(ranges, channel(false)->stream());
  if (!checksums) return answer(token, checksums.error());
  served.checksums = std::move(*checksums);
  served_.emplace(token, std::move(served));
  ++num_hashing_;
}

void InboundLink::on_notify(Notify notify) {
  const bool is_taken =
      context_.transfer_table.completion_queue().notify({std::move(notify.from), std::move(notify.body)});
  answer(notify.token,
         is_taken ? success()
                  : Error{ErrorCode::kRefused, fmt::format("the peer has {} unread notifications and takes no more",
                                                           CompletionQueue::kNotificationsMax)});
}

void InboundLink::answer(std::uint64_t token, const Error& outcome, std::vector<std::uint64_t> checksums) {
  send(Kind::kAnswer, Answer{token, static_cast<std::int32_t>(outcome.code), outcome.what, std::move(checksums)});
}

void InboundLink::on_report(bool is_pull, Channel::Report& report) {
  if (report.is_started) return send(Kind::kData, Data{report.token});
  auto served = served_.extract(report.token);
  served.mapped().access.end();  // the access ends first, so that the grant can be revoked once the answer has arrived
  if (!report.outcome) {
    answer(report.token, report.outcome.error());
  } else if (!is_pull) {
    answer(report.token, served.mapped().refusal);
  }
}

void InboundLink::advance_work() {
  if (is_quiet()) {
    served_.clear();
    num_hashing_ = 0;
  }
  if (is_lost() || num_hashing_ == 0) return;
  for (auto it = served_.begin(); it != served_.end();) {
    Served& served = it->second;
    const Result<bool> is_done = served.checksums == nullptr ? Result<bool>(false) : served.checksums->is_done();
    if (!is_done) return lose("the GPU failed while it computed checksums: " + is_done.error().what);
    if (!*is_done) {
      ++it;
      continue;
    }
    Result<std::vector<std::uint64_t>> checksums = served.checksums->take();
    served.access.end();
    answer(it->first, checksums ? success() : checksums.error(),
           checksums ? std::move(*checksums) : std::vector<std::uint64_t>{});
    --num_hashing_;
    it = served_.erase(it);
  }
}

void InboundLink::on_lost(const std::string& why) {
  log().debug("nccl: the connection that a peer had opened to this process has ended: {}", why);
}

}  // namespace kvferry::nccl
