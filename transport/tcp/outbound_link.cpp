#include "transport/tcp/outbound_link.h"

#include <algorithm>
#include <utility>

#include "transport/base/printable.h"
#include "transport/tcp/tcp_backend.h"

namespace kvferry::tcp {

OutboundLink::OutboundLink(TcpBackend& host, PeerId peer, Address address, std::uint64_t token)
    : host_(host), peer_(peer), address_(std::move(address)), token_(token), lanes_(1) {}

void OutboundLink::start() { try_endpoint(); }

void OutboundLink::submit(AcceptedTransfer accepted) {
  const TransferId id = accepted.id;
  if (is_over_) return host_.transfer_table().complete(id, ErrorCode::kPeerLost, why_over_);
  if (transfers_.empty()) {
    // On an open connection the peer owed no answer before this transfer, so its silence until now does not count. On
    // the others it owes its part of the handshake.
    for (const Lane& lane : lanes_) {
      if (lane.is_open) lane.connection->reset_silence(host_.now());
    }
    host_.arm_silence_check();
  }
  OutTransfer& transfer = *transfers_.emplace(id, std::make_unique<OutTransfer>(std::move(accepted))).first->second;
  enqueue(transfer);
}

void OutboundLink::feed(const FedCopies& more) {
  const auto found = transfers_.find(more.id);
  if (found == transfers_.end()) return;
  found->second->feed(more);
  enqueue(*found->second);
}

void OutboundLink::enqueue(OutTransfer& transfer) {
  std::vector<OutTransfer*>& waiting = queues_[static_cast<std::size_t>(transfer.what().priority)];
  if (std::find(waiting.begin(), waiting.end(), &transfer) == waiting.end()) waiting.push_back(&transfer);
  if (transfer.bytes_left() > host_.options().segment_bytes) open_more_lanes();
  distribute();
}

void OutboundLink::distribute() {
  const auto has_work = [this] {
    return std::any_of(queues_.begin(), queues_.end(), [](auto& q) { return !q.empty(); });
  };
  for (Lane& lane : lanes_) {
    if (is_over_ || !has_work()) return;
    if (lane.is_open) lane.connection->flush(1);
  }
  for (Lane& lane : lanes_) {
    if (lane.is_open && !is_over_ && has_work()) host_.wake(*lane.connection);
  }
}

bool OutboundLink::next_message(Connection& connection, OutMessage& out) {
  Lane& lane = lanes_[connection.lane()];
  if (!lane.is_open) return false;
  const TcpOptions& options = host_.options();
  for (std::vector<OutTransfer*>& waiting : queues_) {
    for (std::size_t index = 0; index < waiting.size(); ++index) {
      OutTransfer& transfer = *waiting[index];
      const bool is_pull = transfer.what().direction == Direction::kPull;
      if (is_pull && !has_window(lane, transfer.what().priority)) continue;
      Segment segment;
      const bool took = transfer.take(connection.lane(), options.segment_bytes, segment);
      if (!took && !transfer.is_dealt()) continue;  // the rest of the transfer is assigned to other lanes
      if (transfer.is_dealt()) waiting.erase(waiting.begin() + static_cast<std::ptrdiff_t>(index));
      if (is_pull && took) {
        request(transfer, segment, lane, out);
      } else if (is_pull) {
        end_pull(transfer, connection);
      } else if (took || transfer.what().is_complete) {
        transfer.append_push(segment, out);
      }
      return true;
    }
  }
  return false;
}

bool OutboundLink::has_window(const Lane& lane, Priority priority) const {
  // Urgent pulls may use twice the window, because the peer serves them before the others.
  const std::uint64_t share = priority == Priority::kUrgent ? 2 : 1;
  return lane.requested_bytes < share * host_.options().window_bytes &&
         lane.requests.size() < share * (kRequestsMax / 2);
}

void OutboundLink::request(OutTransfer& transfer, const Segment& segment, Lane& lane, OutMessage& out) {
  const std::uint32_t number = ++lane.num_requests_made;
  transfer.append_pull(segment, number, out);
  lane.requests.push_back({number, &transfer, segment});
  lane.requested_bytes += segment.bytes;
  ++transfer.num_requests;
}

void OutboundLink::end_pull(OutTransfer& transfer, Connection& connection) {
  if (!transfer.is_dealt() || !transfer.what().is_complete || transfer.num_requests > 0 || transfer.is_final_sent)
    return;
  if (transfer.verifier.has_corrupt()) return finish_corrupt(transfer);
  const std::string& notification = transfer.what().notification;
  if (notification.empty()) return finish(transfer, ErrorCode::kOk, "");
  // The transfer ends only when the answer arrives: if the connection were closed earlier, the notification might be
  // lost.
  transfer.is_final_sent = true;
  connection.send({.kind = MessageKind::kNotify, .id = transfer.what().id.value}, notification);
}

void OutboundLink::finish_corrupt(OutTransfer& transfer) {
  finish(transfer, ErrorCode::kCorrupt, transfer.verifier.what(), transfer.verifier.corrupt_ranges());
}

Result<void> OutboundLink::on_head(Connection& connection, const MessageHead& head) {
  Lane& lane = lanes_[connection.lane()];
  if (head.header.kind != MessageKind::kData && head.header.payload_bytes != 0)
    return protocol_error(
        fmt::format("the peer sent {} bytes of payload with a message of kind {}, which must have none",
                    head.header.payload_bytes, static_cast<int>(head.header.kind)));
  if (!lane.is_open) {
    if (head.header.kind != MessageKind::kWelcome)
      return protocol_error(fmt::format("the peer answered the handshake with a message of kind {}; allowed: kind {}",
                                        static_cast<int>(head.header.kind), static_cast<int>(MessageKind::kWelcome)));
    if (head.header.text_bytes > 0)
      return Error{ErrorCode::kRefused,
                   fmt::format("the peer refused the connection: {}", printable(head.text(), kPeerTextMax))};
    lane.is_open = true;
    connection.trust();
    if (connection.lane() == 0 && std::any_of(transfers_.begin(), transfers_.end(), [&](const auto& one) {
          return one.second->bytes_left() > host_.options().segment_bytes;
        }))
      open_more_lanes();
    return {};
  }
  switch (head.header.kind) {
    case MessageKind::kData:
      return on_data(connection, head);
    case MessageKind::kAnswer:
      return on_answer(head);
    case MessageKind::kPong:
      return {};
    default:
      return protocol_error(
          fmt::format("the peer sent a message of kind {}; allowed: {} (data), {} (answer) and {} (pong)",
                      static_cast<int>(head.header.kind), static_cast<int>(MessageKind::kData),
                      static_cast<int>(MessageKind::kAnswer), static_cast<int>(MessageKind::kPong)));
  }
}

Result<void> OutboundLink::on_data(Connection& connection, const MessageHead& head) {
  Lane& lane = lanes_[connection.lane()];
  const auto found = std::find_if(lane.requests.begin(), lane.requests.end(),
                                  [&](const Request& one) { return one.number == head.header.number; });
  if (found == lane.requests.end())
    return protocol_error(fmt::format("the peer answered request {}, which awaits no answer", head.header.number));
  lane.current = *found;
  lane.requests.erase(found);
  lane.requested_bytes -= lane.current.segment.bytes;
  OutTransfer* transfer = lane.current.transfer;
  if ((head.header.flags & kRefused) != 0 && head.header.payload_bytes == 0) {
    lane.current.transfer = nullptr;
    if (transfer != nullptr) finish(*transfer, ErrorCode::kRefused, refusal_text(std::string(head.text())));
    return {};
  }
  if (head.header.payload_bytes != lane.current.segment.bytes)
    return protocol_error(fmt::format("the peer sent {} bytes where {} were requested", head.header.payload_bytes,
                                      lane.current.segment.bytes));
  if (transfer == nullptr) {
    connection.drop_payload();
    return {};
  }
  const AcceptedTransfer& what = transfer->what();
  lane.current_copies.clear();
  if (transfer->has_checksums()) connection.want_pieces();
  transfer->for_each_piece(lane.current.segment, [&](const Piece& piece) {
    connection.add_sink(what.local_base + what.copies[piece.copy].local_offset + piece.at, piece.bytes);
    if (transfer->has_checksums()) lane.current_copies.emplace_back(piece.copy, piece.ends_copy);
  });
  return {};
}

void OutboundLink::on_piece(Connection& connection, std::size_t part, std::span<const std::byte> bytes, bool ends) {
  const Lane& lane = lanes_[connection.lane()];
  const auto [copy, ends_copy] = lane.current_copies[part];
  lane.current.transfer->check(connection.lane(), copy, bytes, ends && ends_copy);
}

Result<void> OutboundLink::on_message_end(Connection& connection) {
  OutTransfer* transfer = std::exchange(lanes_[connection.lane()].current.transfer, nullptr);
  if (transfer == nullptr) return {};
  --transfer->num_requests;
  end_pull(*transfer, connection);
  return {};
}

Result<void> OutboundLink::on_answer(const MessageHead& head) {
  const auto found = transfers_.find(TransferId{head.header.id});
  if (found == transfers_.end()) return {};  // the transfer has ended meanwhile, for example because it was cancelled
  OutTransfer& transfer = *found->second;
  const auto code = static_cast<ErrorCode>(head.header.code);
  const bool is_pull = transfer.what().direction == Direction::kPull;
  if (is_pull && (code == ErrorCode::kCorrupt || !transfer.is_final_sent))
    return protocol_error(fmt::format("the peer answered a pull's notification {} (transfer {})",
                                      transfer.is_final_sent ? "as if it were a push" : "before it was sent",
                                      head.header.id));
  if (code == ErrorCode::kOk) {
    if (!transfer.is_final_sent)
      return protocol_error(fmt::format("the peer confirmed push {} before all of it was sent", head.header.id));
    finish(transfer, ErrorCode::kOk, "");
    return {};
  }
  AnswerBody body;
  if (head.header.text_bytes > 0) {
    body = KVFERRY_TRY(decode<AnswerBody>(head.text(), "answer of the peer"));
  }
  for (const std::uint32_t index : body.corrupt_ranges) {
    if (index >= transfer.what().copies.size())
      return protocol_error(
          fmt::format("the peer reported range {} (counted from 0) of a transfer of {} ranges as corrupt", index,
                      transfer.what().copies.size()));
  }
  if (code == ErrorCode::kCorrupt) {
    for (const std::uint32_t index : body.corrupt_ranges) transfer.verifier.mark_corrupt(index);
    finish_corrupt(transfer);
  } else {
    finish(transfer, ErrorCode::kRefused, refusal_text(body.what));
  }
  return {};
}

void OutboundLink::cancel(TransferId id) {
  const auto found = transfers_.find(id);
  if (found != transfers_.end()) finish(*found->second, ErrorCode::kCancelled, "this process cancelled the transfer");
}

void OutboundLink::finish(OutTransfer& transfer, ErrorCode code, std::string what, std::vector<std::uint32_t> corrupt) {
  const AcceptedTransfer& accepted = transfer.what();
  const TransferId id = accepted.id;
  std::erase(queues_[static_cast<std::size_t>(accepted.priority)], &transfer);
  bool is_aborted = transfer.num_segments > 0 && !transfer.is_final_sent;
  for (Lane& lane : lanes_) {
    if (!lane.is_open || code == ErrorCode::kOk) continue;
    lane.connection->send_zeros_for(id.value);
    if (std::exchange(is_aborted, false)) {
      lane.connection->send(
          {.kind = MessageKind::kPush, .flags = kFinal | kAborted, .id = id.value, .number = transfer.num_segments});
      host_.wake(*lane.connection);
    }
    if (lane.current.transfer == &transfer) {
      lane.current.transfer = nullptr;
      lane.connection->drop_payload();
    }
    bool is_asked = false;
    for (Request& request : lane.requests) {
      if (request.transfer == &transfer) request.transfer = nullptr, is_asked = true;
    }
    if (!is_asked) continue;
    lane.connection->send({.kind = MessageKind::kCancel, .id = id.value});
    host_.wake(*lane.connection);
  }
  transfers_.erase(id);
  host_.transfer_table().complete(id, code, std::move(what), std::move(corrupt));
}

void OutboundLink::end(ErrorCode code, const std::string& why) {
  if (std::exchange(is_over_, true)) return;
  why_over_ = why;
  host_.transfer_table().lose_peer(peer_);
  for (Lane& lane : lanes_) {
    if (lane.connection != nullptr) host_.close(*std::exchange(lane.connection, nullptr));
    lane = Lane{};
  }
  for (auto& waiting : queues_) waiting.clear();
  while (!transfers_.empty()) finish(*transfers_.begin()->second, code, why);
}

bool OutboundLink::check(TimeNs now) {
  const TimeNs silence_ns = host_.options().silence_ns;
  bool is_owed = false;
  for (Lane& lane : lanes_) {
    if (lane.connection == nullptr || (lane.is_open && transfers_.empty())) continue;
    is_owed = true;
    const TimeNs alive_at = lane.connection->alive_at(now);
    if (now - alive_at >= silence_ns) {
      on_broken(*lane.connection,
                fmt::format("the peer owes an answer and was silent for {} ms; the limit is {} ms (setting silence_ms)",
                            (now - alive_at) / kMillisecond, silence_ns / kMillisecond));
      if (is_over_) return false;
    } else if (lane.is_open && now - alive_at >= silence_ns / 8 && lane.pinged_at <= alive_at) {
      lane.pinged_at = now;
      lane.connection->send({.kind = MessageKind::kPing});
      host_.wake(*lane.connection);
    }
  }
  return is_owed;
}

}  // namespace kvferry::tcp
