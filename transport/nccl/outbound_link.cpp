#include "transport/nccl/outbound_link.h"

#include <algorithm>
#include <utility>

#include "transport/backend.h"
#include "transport/base/log.h"

namespace kvferry::nccl {
namespace {

// A background transfer posts a piece only while fewer than pieces_per_peer_max / kBackgroundShare pieces of all
// transfers are posted, or none is. An urgent transfer has to wait for the pieces that are posted.
constexpr std::uint32_t kBackgroundShare = 4;

std::vector<std::span<std::byte>> memory_of(const std::vector<Part>& parts) {
  std::vector<std::span<std::byte>> memory;
  memory.reserve(parts.size());
  for (const Part& part : parts) memory.emplace_back(part.local, part.bytes);
  return memory;
}

}  // namespace

void OutboundLink::submit(AcceptedTransfer accepted) {
  auto transfer = std::make_unique<OutTransfer>(std::move(accepted));
  if (is_lost()) {
    end_transfer(*transfer, lost_code_, lost_why_);
  } else if (!std::exchange(has_sent_hello_, true)) {
    send(Kind::kHello, Hello{kProtocolVersion, context_.control.address()});
  }
  const auto goes_after = [](Priority priority, const auto& other) { return priority < other->what().priority; };
  const auto place = std::upper_bound(transfers_.begin(), transfers_.end(), transfer->what().priority, goes_after);
  transfers_.insert(place, std::move(transfer));
}

void OutboundLink::feed(const FedCopies& more) {
  for (const auto& transfer : transfers_) {
    if (transfer->what().id == more.id) return transfer->feed(more);
  }
}

void OutboundLink::cancel(TransferId id) {
  for (const auto& transfer : transfers_) {
    if (transfer->what().id == id)
      return end_transfer(*transfer, ErrorCode::kCancelled, "this process cancelled the transfer");
  }
}

void OutboundLink::end(ErrorCode code, const std::string& why) {
  if (!is_lost()) lost_code_ = code;
  is_ended_ = true;
  for (const auto& transfer : transfers_) end_transfer(*transfer, code, why);
  lose(why);
}

void OutboundLink::on_lost(const std::string& why) {
  lost_why_ = why;
  if (!is_ended_) log().warn("nccl: lost the connection to a peer (number {} in this process): {}", id_, why);
  context_.transfer_table.lose_peer(id_);
  for (const auto& transfer : transfers_) end_transfer(*transfer, lost_code_, why);
}

Result<void> OutboundLink::ensure_channel(bool is_pull) {
  if (channel(is_pull) != nullptr) return {};
  std::string id = KVFERRY_TRY(context_.communicators.make_id());
  KVFERRY_TRY(open_channel(is_pull, id, 0, is_pull ? Role::kReceiver : Role::kSender));
  send(Kind::kOpen, Open{is_pull, std::move(id)});
  return {};
}

bool OutboundLink::has_room(Priority priority) const {
  const std::uint32_t pieces_max = context_.options.pieces_per_peer_max;
  return num_pieces_ <
         (priority == Priority::kBackground ? std::max<std::uint32_t>(pieces_max / kBackgroundShare, 1) : pieces_max);
}

void OutboundLink::post_piece(OutTransfer& transfer) {
  const bool is_pull = transfer.is_pull();
  if (Result<void> ok = ensure_channel(is_pull); !ok)
    return end_transfer(transfer, ErrorCode::kInternal, ok.error().what);
  const std::uint64_t token = ++num_tokens_;
  Request& request = requests_[token];
  request = {is_pull ? Wants::kPull : Wants::kPush, &transfer, transfer.take_piece(context_.options.piece_bytes)};
  ++num_pieces_;
  if (is_pull) return send_request(token, request);
  request.is_touching = true;  // on_report() sends the request when the channel has started the piece
  ++transfer.num_touching;
  channel(is_pull)->post({token, memory_of(request.parts), context_.options.packed_bytes_max});
}

void OutboundLink::send_request(std::uint64_t token, const Request& request) {
  const RegionDescriptor& remote = request.transfer->what().remote;
  // Wants and Purpose have equal values, except kNotify, which is never sent here.
  const auto purpose = static_cast<std::uint8_t>(request.wants);
  Ask message{token, purpose, remote.region, remote.grant, context_.options.packed_bytes_max, {}};
  message.extents.reserve(request.parts.size() * 2);
  for (const Part& part : request.parts) {
    message.extents.push_back(part.remote_offset);
    message.extents.push_back(part.bytes);
  }
  send(Kind::kAsk, message);
}

void OutboundLink::post_hash(OutTransfer& transfer) {
  std::vector<Part> copies = transfer.take_hashable();
  if (!transfer.is_pull()) {
    const std::uint64_t token = ++num_tokens_;
    Request& request = requests_[token];
    request = {Wants::kHash, &transfer, std::move(copies)};
    return send_request(token, request);
  }
  const std::vector<std::span<std::byte>> memory = memory_of(copies);
  const std::vector<std::span<const std::byte>> ranges(memory.begin(), memory.end());
  auto checksums = context_.device.checksums(ranges, channel(true)->stream());
  if (!checksums) return end_transfer(transfer, ErrorCode::kInternal, checksums.error().what);
  ++transfer.num_touching;
  hashing_.push_back({&transfer, std::move(copies), std::move(*checksums)});
}

void OutboundLink::post_notification(OutTransfer& transfer) {
  transfer.is_notifying = true;
  const std::uint64_t token = ++num_tokens_;
  requests_[token] = {Wants::kNotify, &transfer, {}};
  send(Kind::kNotify, Notify{token, context_.source_address, transfer.what().notification});
}

Result<void> OutboundLink::on_message(const Message& message) {
  if (message.kind == Kind::kPing) return {};
  if (message.kind == Kind::kData) {
    Data data = KVFERRY_TRY(decode<Data>(message.body, "announcement of the peer"));
    return on_data(data.token);
  }
  if (message.kind != Kind::kAnswer)
    return protocol_error(
        fmt::format("the peer sent a message of kind {}; allowed: {} (data), {} (answer), {} (ping) and {} (end)",
                    static_cast<int>(message.kind), static_cast<int>(Kind::kData), static_cast<int>(Kind::kAnswer),
                    static_cast<int>(Kind::kPing), static_cast<int>(Kind::kBye)));
  return on_answer(KVFERRY_TRY(decode<Answer>(message.body, "answer of the peer")));
}

Result<void> OutboundLink::on_data(std::uint64_t token) {
  const auto found = requests_.find(token);
  if (found == requests_.end() || found->second.wants != Wants::kPull || std::exchange(found->second.is_touching, true))
    return protocol_error(fmt::format(
        "the peer announced the bytes of request {}, which is no pull of this process or was announced before", token));
  Request& request = found->second;
  // The bytes arrive in any case. If the transfer has ended, they are dropped.
  if (request.transfer != nullptr && request.transfer->is_ended()) request.transfer = nullptr;
  if (request.transfer != nullptr) ++request.transfer->num_touching;
  channel(true)->post(
      {token, memory_of(request.parts), context_.options.packed_bytes_max, request.transfer == nullptr});
  return {};
}

Result<void> OutboundLink::on_answer(const Answer& answer) {
  const auto found = requests_.find(answer.token);
  const bool is_ok = answer.code == static_cast<std::int32_t>(ErrorCode::kOk);
  if (found == requests_.end() || found->second.is_answered ||
      (found->second.wants == Wants::kPull && (is_ok || found->second.is_touching)))
    return protocol_error(
        fmt::format("the peer answered request {}, which was not made or needs no answer", answer.token));
  Request& request = found->second;
  OutTransfer* const transfer = request.transfer;
  if (transfer != nullptr && !is_ok) {
    const bool is_refusal = answer.code == static_cast<std::int32_t>(ErrorCode::kRefused);
    const std::string why = refusal_text(answer.what);
    end_transfer(*transfer, is_refusal ? ErrorCode::kRefused : ErrorCode::kInternal, why);
  } else if (transfer != nullptr && request.wants == Wants::kHash) {
    if (answer.checksums.size() != request.parts.size())
      return protocol_error(fmt::format("the peer sent {} checksums for {} ranges; each range needs one",
                                        answer.checksums.size(), request.parts.size()));
    transfer->hashed(request.parts, answer.checksums);
  } else if (transfer != nullptr && request.wants == Wants::kNotify) {
    transfer->is_notified = true;
  } else if (transfer != nullptr && !request.is_touching) {
    transfer->arrived(request.parts);
  }
  request.is_answered = true;
  if (request.is_touching) return {};  // the channel still sends the push; on_report() will end the request
  if (request.wants == Wants::kPull || request.wants == Wants::kPush) --num_pieces_;
  requests_.erase(found);
  return {};
}

void OutboundLink::on_report(bool, Channel::Report& report) {
  const auto found = requests_.find(report.token);
  Request& request = found->second;
  if (report.is_started) return send_request(report.token, request);
  OutTransfer* const transfer = request.transfer;
  request.is_touching = false;
  if (transfer != nullptr) --transfer->num_touching;
  if (!report.outcome) {
    if (transfer != nullptr) end_transfer(*transfer, ErrorCode::kInternal, report.outcome.error().what);
  } else if (request.wants == Wants::kPush && !request.is_answered) {
    return;
  } else if (transfer != nullptr) {
    transfer->arrived(request.parts);
  }
  --num_pieces_;
  requests_.erase(found);
}

void OutboundLink::poll_hashes() {
  for (std::size_t index = 0; index < hashing_.size() && !is_lost();) {
    Hashing& hashing = hashing_[index];
    const Result<bool> is_done = hashing.checksums->is_done();
    if (!is_done) return lose("the GPU failed while it computed checksums: " + is_done.error().what);
    if (!*is_done) {
      ++index;
      continue;
    }
    --hashing.transfer->num_touching;
    if (const Result<std::vector<std::uint64_t>> checksums = hashing.checksums->take()) {
      hashing.transfer->hashed(hashing.copies, *checksums);
    } else {
      end_transfer(*hashing.transfer, ErrorCode::kInternal, checksums.error().what);
    }
    hashing_.erase(hashing_.begin() + static_cast<std::ptrdiff_t>(index));
  }
}

void OutboundLink::advance_work() {
  poll_hashes();
  for (const auto& transfer : transfers_) {
    while (!is_lost() && transfer->has_piece() && has_room(transfer->what().priority)) post_piece(*transfer);
    while (!is_lost() && transfer->has_hashable()) post_hash(*transfer);
    transfer->end_if_corrupt();
    if (transfer->is_delivered() && !transfer->what().notification.empty() && !transfer->is_notifying)
      post_notification(*transfer);
  }
  if (!is_lost() && has_stuck()) {
    TimeNs progressed_at = 0;
    for (const bool is_pull : {true, false}) {
      if (const Channel* const one = channel(is_pull)) progressed_at = std::max(progressed_at, one->progressed_at());
    }
    const bool is_stuck = std::any_of(transfers_.begin(), transfers_.end(), [&](const auto& one) {
      return one->is_ended() && one->num_touching > 0 &&
             context_.now - std::max(one->ended_at, progressed_at) >= context_.options.stuck_ns;
    });
    if (is_stuck)
      lose(fmt::format("a cancelled or failed transfer made no progress for {} ms, so the connection was ended",
                       context_.options.stuck_ns / kMillisecond));
  }
  if (is_quiet() && !(requests_.empty() && hashing_.empty())) {
    hashing_.clear();
    requests_.clear();
    num_pieces_ = 0;
    for (const auto& transfer : transfers_) transfer->num_touching = 0;
  }
  std::erase_if(transfers_, [this](const std::unique_ptr<OutTransfer>& transfer) {
    if (!is_over(*transfer)) return false;
    complete(*transfer);
    return true;
  });
}

bool OutboundLink::has_stuck() const {
  return std::any_of(transfers_.begin(), transfers_.end(),
                     [](const auto& one) { return one->is_ended() && one->num_touching > 0; });
}

void OutboundLink::end_transfer(OutTransfer& transfer, ErrorCode code, const std::string& why) {
  if (transfer.is_ended()) return;
  transfer.end(code, why);
  transfer.ended_at = context_.now;
  for (auto it = requests_.begin(); it != requests_.end();) {
    Request& request = it->second;
    const bool is_withdrawn = request.transfer == &transfer && request.wants == Wants::kPush && request.is_touching &&
                              channel(false)->withdraw(it->first);
    if (is_withdrawn) {
      --transfer.num_touching;
      --num_pieces_;
    }
    it = is_withdrawn ? requests_.erase(it) : std::next(it);
  }
}

bool OutboundLink::is_over(const OutTransfer& transfer) const {
  if (transfer.is_ended()) return transfer.num_touching == 0;
  return transfer.is_delivered() && (transfer.what().notification.empty() || transfer.is_notified);
}

void OutboundLink::complete(OutTransfer& transfer) {
  for (auto& [token, request] : requests_) {
    if (request.transfer == &transfer) request.transfer = nullptr;
  }
  const bool is_corrupt = transfer.code() == ErrorCode::kCorrupt;
  context_.transfer_table.complete(transfer.what().id, transfer.code(), transfer.why(),
                                   is_corrupt ? transfer.corrupt_ranges() : std::vector<std::uint32_t>{});
}

}  // namespace kvferry::nccl
