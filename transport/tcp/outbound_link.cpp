#include "transport/tcp/outbound_link.h"

#include <algorithm>
#include <utility>

#include "transport/base/log.h"

namespace kvferry::tcp {
namespace {

Error broken_rules(std::string what) { return Error{ErrorCode::kCorrupt, std::move(what)}; }

}  // namespace

OutboundLink::OutboundLink(LinkHost& host, PeerId peer, Address address, std::uint64_t token)
    : host_(host), peer_(peer), address_(std::move(address)), token_(token), lanes_(1) {}

void OutboundLink::start() { try_endpoint(); }

void OutboundLink::try_endpoint() {
  for (; endpoint_ < address_.endpoints.size(); ++endpoint_) {
    Result<OwnedFd> socket = begin_connect(address_.endpoints[endpoint_]);
    if (socket) return begin_lane(0, std::move(*socket));
    tried_ += fmt::format("; {}: {}", address_.endpoints[endpoint_].host, socket.error().what);
  }
  lose(fmt::format("no connection to the peer{}", tried_));
}

void OutboundLink::begin_lane(std::size_t index, OwnedFd socket) {
  Lane& lane = lanes_[index];
  lane.is_tried = true;
  lane.connection = &host_.adopt(std::move(socket), *this, true);
  lane.connection->set_lane(index);
  host_.arm();
}

void OutboundLink::open_more() {
  if (!lanes_[0].is_open) return;
  const TcpOptions& options = host_.options();
  lanes_.resize(is_same_host(lanes_[0].connection->fd()) ? options.local_connections : options.connections);
  for (std::size_t index = 1; index < lanes_.size(); ++index) {
    if (lanes_[index].is_tried) continue;
    Result<OwnedFd> socket = begin_connect(address_.endpoints[endpoint_]);
    if (socket) begin_lane(index, std::move(*socket));
    lanes_[index].is_tried = true;
  }
}

void OutboundLink::on_connected(Connection& connection) {
  skip_congestion_control_within_host(connection.fd());
  const Hello hello{kProtocolVersion, address_.incarnation, address_.secret, host_.signature(), token_};
  connection.send({.kind = FrameKind::kHello, .id = kMagic}, encode(hello));
}

void OutboundLink::on_broken(Connection& connection, const std::string& why) {
  Lane& lane = lanes_[connection.lane()];
  if (lane.is_open) return lose(why);
  lane.connection = nullptr;
  host_.close(connection);
  if (connection.lane() != 0) {
    log().info("tcp: going on with fewer connections to a peer: {}", why);
    return;
  }
  tried_ += fmt::format("; {}: {}", address_.endpoints[endpoint_].host, why);
  ++endpoint_;
  try_endpoint();
}

void OutboundLink::submit(AcceptedTransfer accepted) {
  const TransferId id = accepted.id;
  if (is_over_) return host_.transfer_table().complete(id, ErrorCode::kPeerLost, over_why_);
  if (transfers_.empty()) {
    // Nothing was owed, so silence meant nothing.
    for (const Lane& lane : lanes_) {
      if (lane.connection != nullptr) lane.connection->forgive(host_.now());
    }
    host_.arm();
  }
  OutTransfer& transfer = *transfers_.emplace(id, std::make_unique<OutTransfer>(std::move(accepted))).first->second;
  queue(transfer);
}

bool OutboundLink::feed(TransferId id, FedCopies& more) {
  const auto found = transfers_.find(id);
  if (found == transfers_.end()) return false;
  found->second->feed(std::move(more));
  queue(*found->second);
  return true;
}

void OutboundLink::queue(OutTransfer& transfer) {
  std::vector<OutTransfer*>& waiting = queues_[static_cast<std::size_t>(transfer.what().priority)];
  if (std::find(waiting.begin(), waiting.end(), &transfer) == waiting.end()) waiting.push_back(&transfer);
  if (transfer.bytes_left() > host_.options().segment_bytes) open_more();
  deal();
}

void OutboundLink::deal() {
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

bool OutboundLink::next_frame(Connection& connection, OutFrame& out) {
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
      if (!took && !transfer.is_dealt()) continue;  // the rest is other lanes'
      if (transfer.is_dealt()) waiting.erase(waiting.begin() + static_cast<std::ptrdiff_t>(index));
      if (is_pull) {
        if (took) {
          pull_frame(transfer, segment, lane, out);
        } else {
          end_pull(transfer, connection);
        }
      } else if (took || transfer.what().is_complete) {
        push_frame(transfer, segment, out);
      }
      return true;
    }
  }
  return false;
}

bool OutboundLink::has_window(const Lane& lane, Priority priority) const {
  // An urgent one may still be asked for behind a full window: the peer answers it before the others.
  const std::uint64_t share = priority == Priority::kUrgent ? 2 : 1;
  return lane.asked_bytes < share * host_.options().window_bytes && lane.requests.size() < share * (kRequestsMax / 2);
}

void OutboundLink::push_frame(OutTransfer& transfer, const Segment& segment, OutFrame& out) {
  const AcceptedTransfer& what = transfer.what();
  const bool is_final = transfer.is_dealt() && what.is_complete;
  FrameHeader header{.kind = FrameKind::kPush,
                     .num_entries = segment.num_pieces,
                     .id = what.id.value,
                     .region = what.remote.region,
                     .grant = what.remote.grant,
                     .payload_bytes = static_cast<std::uint32_t>(segment.bytes)};
  if (segment.num_pieces > 0) ++transfer.num_segments;
  if (is_final) {
    transfer.is_final_sent = true;
    header.flags |= transfer.corrupt.empty() ? kFinal : kFinal | kUnsound;
    header.num_segments = transfer.num_segments;
    header.text_bytes = static_cast<std::uint32_t>(what.notification.size());
  }
  if (transfer.has_checksums()) header.flags |= kChecksums;
  append_bytes(out.head, &header, sizeof(header));
  out.transfer = segment.bytes > 0 ? what.id.value : 0;
  transfer.for_each_piece(segment, [&](std::size_t copy, std::uint64_t at, std::uint64_t bytes, bool ends) {
    const CopyRange& range = what.copies[copy];
    const Entry entry{range.remote_offset + at, static_cast<std::uint32_t>(bytes),
                      static_cast<std::uint32_t>(copy) | (ends ? kEndsRange : 0)};
    append_bytes(out.head, &entry, sizeof(entry));
    out.parts.push_back({what.local_base + range.local_offset + at, bytes});
  });
  if (transfer.has_checksums()) {
    transfer.for_each_piece(segment, [&](std::size_t copy, std::uint64_t, std::uint64_t, bool) {
      append_bytes(out.head, &what.checksums[copy], sizeof(std::uint64_t));
    });
  }
  if (is_final) out.head += what.notification;
}

void OutboundLink::pull_frame(OutTransfer& transfer, const Segment& segment, Lane& lane, OutFrame& out) {
  const AcceptedTransfer& what = transfer.what();
  const FrameHeader header{.kind = FrameKind::kPull,
                           .priority = static_cast<std::uint8_t>(what.priority),
                           .num_entries = segment.num_pieces,
                           .id = what.id.value,
                           .request = ++lane.num_requests_made,
                           .region = what.remote.region,
                           .grant = what.remote.grant};
  append_bytes(out.head, &header, sizeof(header));
  transfer.for_each_piece(segment, [&](std::size_t copy, std::uint64_t at, std::uint64_t bytes, bool) {
    const Entry entry{what.copies[copy].remote_offset + at, static_cast<std::uint32_t>(bytes), 0};
    append_bytes(out.head, &entry, sizeof(entry));
  });
  lane.requests.push_back({header.request, &transfer, segment});
  lane.asked_bytes += segment.bytes;
  ++transfer.num_requests;
}

void OutboundLink::end_pull(OutTransfer& transfer, Connection& connection) {
  if (!transfer.is_dealt() || !transfer.what().is_complete || transfer.num_requests > 0 || transfer.is_final_sent)
    return;
  if (!transfer.corrupt.empty()) return finish_corrupt(transfer);
  const std::string& notification = transfer.what().notification;
  if (notification.empty()) return finish(transfer, ErrorCode::kOk, "");
  // Over when the peer has it: a connection that is closed with bytes unread takes back what it sent before.
  transfer.is_final_sent = true;
  connection.send({.kind = FrameKind::kNotify, .id = transfer.what().id.value}, notification);
}

void OutboundLink::finish_corrupt(OutTransfer& transfer) {
  std::sort(transfer.corrupt.begin(), transfer.corrupt.end());
  const std::string what = fmt::format("{} ranges do not have their checksums", transfer.corrupt.size());
  finish(transfer, ErrorCode::kCorrupt, what, std::move(transfer.corrupt));
}

Result<void> OutboundLink::on_head(Connection& connection, const FrameHead& head) {
  Lane& lane = lanes_[connection.lane()];
  if (head.header.kind != FrameKind::kData && head.header.payload_bytes != 0)
    return broken_rules("the peer sent bytes that nobody asked for");
  if (!lane.is_open) {
    if (head.header.kind != FrameKind::kWelcome) return broken_rules("the peer did not answer the hello");
    if (head.header.text_bytes > 0) return Error{ErrorCode::kRefused, fmt::format("it said: {}", head.text())};
    lane.is_open = true;
    connection.trust();
    if (connection.lane() == 0 && std::any_of(transfers_.begin(), transfers_.end(), [&](const auto& one) {
          return one.second->bytes_left() > host_.options().segment_bytes;
        }))
      open_more();
    return {};
  }
  switch (head.header.kind) {
    case FrameKind::kData:
      return on_data(connection, head);
    case FrameKind::kAnswer:
      return on_answer(head);
    case FrameKind::kPong:
      return {};
    default:
      return broken_rules(fmt::format("the peer sent a frame of kind {}", static_cast<int>(head.header.kind)));
  }
}

Result<void> OutboundLink::on_data(Connection& connection, const FrameHead& head) {
  Lane& lane = lanes_[connection.lane()];
  const auto found = std::find_if(lane.requests.begin(), lane.requests.end(),
                                  [&](const Request& one) { return one.number == head.header.request; });
  if (found == lane.requests.end()) return broken_rules("the peer answered what nobody asked");
  lane.current = *found;
  lane.requests.erase(found);
  lane.asked_bytes -= lane.current.segment.bytes;
  OutTransfer* transfer = lane.current.transfer;
  if ((head.header.flags & kRefused) != 0 && head.header.payload_bytes == 0) {
    lane.current.transfer = nullptr;
    if (transfer != nullptr) finish(*transfer, ErrorCode::kRefused, std::string(head.text()));
    return {};
  }
  if (head.header.payload_bytes != lane.current.segment.bytes)
    return broken_rules(fmt::format("the peer sent {} bytes where {} were asked for", head.header.payload_bytes,
                                    lane.current.segment.bytes));
  if (transfer == nullptr) {
    connection.drop_payload();
    return {};
  }
  const AcceptedTransfer& what = transfer->what();
  lane.current_copies.clear();
  if (transfer->has_checksums()) connection.want_pieces();
  transfer->for_each_piece(lane.current.segment,
                           [&](std::size_t copy, std::uint64_t at, std::uint64_t bytes, bool ends) {
                             connection.add_sink(what.local_base + what.copies[copy].local_offset + at, bytes);
                             if (transfer->has_checksums()) lane.current_copies.push_back(copy * 2 + (ends ? 1 : 0));
                           });
  return {};
}

void OutboundLink::on_piece(Connection& connection, std::size_t part, std::span<const std::byte> bytes, bool ends) {
  const Lane& lane = lanes_[connection.lane()];
  const std::size_t copy = lane.current_copies[part];
  lane.current.transfer->check(connection.lane(), copy / 2, bytes, ends && copy % 2 == 1);
}

Result<void> OutboundLink::on_frame(Connection& connection) {
  OutTransfer* transfer = std::exchange(lanes_[connection.lane()].current.transfer, nullptr);
  if (transfer == nullptr) return {};
  --transfer->num_requests;
  end_pull(*transfer, connection);
  return {};
}

Result<void> OutboundLink::on_answer(const FrameHead& head) {
  const auto found = transfers_.find(TransferId{head.header.id});
  if (found == transfers_.end()) return {};  // cancelled meanwhile
  OutTransfer& transfer = *found->second;
  const auto code = static_cast<ErrorCode>(head.header.code);
  if (transfer.what().direction == Direction::kPull && (code != ErrorCode::kOk || !transfer.is_final_sent))
    return broken_rules("the peer answered a pull");
  if (code == ErrorCode::kOk) {
    if (!transfer.is_final_sent) return broken_rules("the peer answered before it had everything");
    finish(transfer, ErrorCode::kOk, "");
    return {};
  }
  AnswerBody body;
  if (head.header.text_bytes > 0) {
    Result<AnswerBody> decoded = decode<AnswerBody>(head.text(), "answer");
    if (!decoded) return std::move(decoded).error();
    body = std::move(*decoded);
  }
  for (const std::uint32_t index : body.corrupt_ranges) {
    if (index >= transfer.what().copies.size()) return broken_rules("the peer named a range that does not exist");
  }
  if (code == ErrorCode::kCorrupt) {
    transfer.corrupt.insert(transfer.corrupt.end(), body.corrupt_ranges.begin(), body.corrupt_ranges.end());
    finish_corrupt(transfer);
  } else {
    finish(transfer, ErrorCode::kRefused, body.what.empty() ? "the peer refused it" : body.what);
  }
  return {};
}

bool OutboundLink::cancel(TransferId id) {
  const auto found = transfers_.find(id);
  if (found == transfers_.end()) return false;
  finish(*found->second, ErrorCode::kCancelled, "cancelled");
  return true;
}

void OutboundLink::finish(OutTransfer& transfer, ErrorCode code, std::string what, std::vector<std::uint32_t> corrupt) {
  const AcceptedTransfer& accepted = transfer.what();
  const TransferId id = accepted.id;
  std::erase(queues_[static_cast<std::size_t>(accepted.priority)], &transfer);
  bool is_aborted = transfer.num_segments > 0 && !transfer.is_final_sent;
  for (Lane& lane : lanes_) {
    if (!lane.is_open || code == ErrorCode::kOk) continue;
    lane.connection->scrap_payload(id.value);
    if (std::exchange(is_aborted, false)) {
      lane.connection->send({.kind = FrameKind::kPush,
                             .flags = kFinal | kAborted,
                             .id = id.value,
                             .num_segments = transfer.num_segments});
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
    lane.connection->send({.kind = FrameKind::kCancel, .id = id.value});
    host_.wake(*lane.connection);
  }
  transfers_.erase(id);
  host_.transfer_table().complete(id, code, std::move(what), std::move(corrupt));
}

void OutboundLink::end(ErrorCode code, const std::string& why) {
  if (std::exchange(is_over_, true)) return;
  over_why_ = why;
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
      on_broken(*lane.connection, fmt::format("the peer said nothing for {} ms", (now - alive_at) / kMillisecond));
      if (is_over_) return false;
    } else if (lane.is_open && now - alive_at >= silence_ns / 8 && lane.pinged_at <= alive_at) {
      lane.pinged_at = now;
      lane.connection->send({.kind = FrameKind::kPing});
      host_.wake(*lane.connection);
    }
  }
  return is_owed;
}

}  // namespace kvferry::tcp
