#include "transport/tcp/inbound_link.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "transport/base/log.h"
#include "transport/tcp/tcp_backend.h"

namespace kvferry::tcp {
InboundLink::InboundLink(TcpBackend& host, std::string from, std::function<void()> over)
    : host_(host), from_(std::move(from)), over_(std::move(over)) {}

bool InboundLink::add(Connection& connection, std::optional<std::string> member) {
  if (lanes_.size() >= kLanesMax) return false;
  connection.set_lane(lanes_.size());
  connection.set_handler(*this);
  lanes_.push_back(std::make_unique<Lane>());
  lanes_.back()->connection = &connection;
  lanes_.back()->member = std::move(member);
  return true;
}

Result<void> InboundLink::on_head(Connection& connection, const MessageHead& head) {
  Lane& lane = *lanes_[connection.lane()];
  const MessageHeader& header = head.header;
  lane.current = header;
  if (header.text_bytes > TransferTable::kNotificationBytesMax)
    return protocol_error(
        fmt::format("the peer sent a text of {} bytes; at most 65536 are allowed", header.text_bytes));
  if (header.kind != MessageKind::kPush && header.payload_bytes != 0)
    return protocol_error(
        fmt::format("the peer sent {} bytes of payload with a message of kind {}, which must have none",
                    header.payload_bytes, static_cast<int>(header.kind)));
  switch (header.kind) {
    case MessageKind::kPush:
      return begin_push(connection, head);
    case MessageKind::kPull:
      return queue_pull(lane, head);
    case MessageKind::kNotify:
      notify(connection, header.id, std::string(head.text()));
      return {};
    case MessageKind::kCancel:
      cancel_pull(lane, header.id);
      return {};
    case MessageKind::kPing:
      connection.send({.kind = MessageKind::kPong});
      return {};
    default:
      return protocol_error(
          fmt::format("the peer sent a message of kind {}; allowed: {} (push), {} (pull), {} (notification), {} "
                      "(cancel) and {} (ping)",
                      static_cast<int>(header.kind), static_cast<int>(MessageKind::kPush),
                      static_cast<int>(MessageKind::kPull), static_cast<int>(MessageKind::kNotify),
                      static_cast<int>(MessageKind::kCancel), static_cast<int>(MessageKind::kPing)));
  }
}

namespace {

/// Returns the lowest offset and the highest end of all entries. Returns an error if an entry is empty or does not end
/// below 2^64, or if the entries do not have `expected_bytes` bytes in all.
template <class EntryAt>
Result<std::pair<std::uint64_t, std::uint64_t>> span_of(std::size_t num_entries, std::uint64_t expected_bytes,
                                                        EntryAt entry_at) {
  std::uint64_t first = std::numeric_limits<std::uint64_t>::max();
  std::uint64_t end = 0;
  std::uint64_t bytes = 0;
  for (std::size_t index = 0; index < num_entries; ++index) {
    const Entry entry = entry_at(index);
    if (entry.bytes == 0 || entry.bytes > std::numeric_limits<std::uint64_t>::max() - entry.offset)
      return protocol_error(
          fmt::format("the peer named a range of {} bytes at offset {}; a range must have bytes and end below 2^64",
                      entry.bytes, entry.offset));
    first = std::min(first, entry.offset);
    end = std::max(end, entry.offset + entry.bytes);
    bytes += entry.bytes;
  }
  if (bytes != expected_bytes)
    return protocol_error(
        fmt::format("the peer's ranges have {} bytes in all, but its payload has {}", bytes, expected_bytes));
  return std::pair{first, end};
}

}  // namespace

Result<void> InboundLink::begin_push(Connection& connection, const MessageHead& head) {
  const MessageHeader& header = head.header;
  const auto [found, is_new] = pushes_.try_emplace(header.id);
  Push& push = found->second;
  if (is_new && pushes_.size() > kPushesMax)
    return protocol_error(fmt::format("the peer began {} pushes at a time; at most 65536 are allowed", pushes_.size()));
  if ((header.flags & kFinal) != 0) {
    if (std::exchange(push.is_final, true))
      return protocol_error(fmt::format("the peer ended push {} twice", header.id));
    push.is_aborted = (header.flags & kAborted) != 0;
    push.is_unsound = (header.flags & kUnsound) != 0;
    push.num_segments = header.number;
    push.notification = head.text();
    pending_text_bytes_ += push.notification.size();
    if (pending_text_bytes_ > kPendingTextBytesMax)
      return protocol_error(
          fmt::format("the notifications of the peer's unfinished pushes have {} bytes; at most {} are allowed",
                      pending_text_bytes_, kPendingTextBytesMax));
  }
  // A push ends only after all of its segments, so pushes_ contains the push while any connection receives payload of
  // it.
  if (header.num_entries > 0) ++push.num_segments_begun;
  if (push.is_final && push.num_segments_begun > push.num_segments)
    return protocol_error(fmt::format("the peer sent {} segments of push {}, but announced only {}",
                                      push.num_segments_begun, header.id, push.num_segments));
  if (header.num_entries == 0)
    return header.payload_bytes == 0
               ? Result<void>{}
               : protocol_error(fmt::format("the peer sent {} bytes of payload without a range to write them to",
                                            header.payload_bytes));
  const auto span =
      KVFERRY_TRY(span_of(header.num_entries, header.payload_bytes, [&](auto index) { return head.entry(index); }));
  if (push.code != ErrorCode::kOk) {
    connection.drop_payload();
    return {};
  }
  TransferTable& transfer_table = host_.transfer_table();
  const RegionId region{header.region};
  const GrantId grant{header.grant};
  Result<std::byte*> memory = transfer_table.begin_access(region, grant, span.first, span.second - span.first, true,
                                                          lanes_[connection.lane()]->member);
  if (!memory) {
    // The initiator ends its push when this answer arrives. Bytes of the push that are still on their way are dropped.
    push.code = ErrorCode::kRefused;
    connection.drop_payload();
    answer(connection, header.id, ErrorCode::kRefused, std::move(memory.error().what), {});
    return {};
  }
  connection.set_access(MemoryAccess(transfer_table, region, grant));
  Lane& lane = *lanes_[connection.lane()];
  const bool is_checked = (header.flags & kChecksums) != 0;
  if (is_checked) {
    connection.want_pieces();
    lane.expected.clear();
    lane.checksums.clear();
  }
  for (std::size_t index = 0; index < header.num_entries; ++index) {
    const Entry entry = head.entry(index);
    connection.add_sink(*memory + (entry.offset - span.first), entry.bytes);
    if (!is_checked) continue;
    lane.expected.push_back(entry);
    lane.checksums.push_back(head.checksum(index));
  }
  return {};
}

void InboundLink::on_piece(Connection& connection, std::size_t part, std::span<const std::byte> bytes, bool ends) {
  const Lane& lane = *lanes_[connection.lane()];
  Push& push = pushes_.at(lane.current.id);
  const std::uint32_t index = lane.expected[part].index;
  const auto digest = push.digests[connection.lane()].add(bytes, ends && (index & kEndsRange) != 0);
  if (digest && *digest != lane.checksums[part] && push.corrupt.size() < kCorruptMax)
    push.corrupt.push_back(index & ~kEndsRange);
}

Result<void> InboundLink::on_message_end(Connection& connection) {
  const MessageHeader& header = lanes_[connection.lane()]->current;
  if (header.kind != MessageKind::kPush) return {};
  const auto found = pushes_.find(header.id);
  if (header.num_entries > 0) ++found->second.num_segments_in;
  if (!found->second.is_final || found->second.num_segments_in < found->second.num_segments) return {};
  return end_push(connection, header.id);
}

Result<void> InboundLink::end_push(Connection& connection, std::uint64_t id) {
  Push push = std::move(pushes_.extract(id).mapped());
  pending_text_bytes_ -= push.notification.size();
  if (push.is_aborted || push.code != ErrorCode::kOk) return {};
  if (push.is_unsound || !push.corrupt.empty()) {
    std::sort(push.corrupt.begin(), push.corrupt.end());
    answer(connection, id, ErrorCode::kCorrupt, "", std::move(push.corrupt));
  } else {
    notify(connection, id, std::move(push.notification));
  }
  return {};
}

/// Delivers the notification, if it is not empty, and answers the transfer `id`.
void InboundLink::notify(Connection& connection, std::uint64_t id, std::string notification) {
  const std::optional<std::string>& member = lanes_[connection.lane()]->member;
  if (notification.empty() ||
      host_.transfer_table().completion_queue().notify({from_, std::move(notification), member})) {
    connection.send({.kind = MessageKind::kAnswer, .id = id});
    return;
  }
  answer(connection, id, ErrorCode::kRefused,
         fmt::format("the peer has {} unread notifications and takes no more", CompletionQueue::kNotificationsMax), {});
}

void InboundLink::answer(Connection& connection, std::uint64_t id, ErrorCode code, std::string what,
                         std::vector<std::uint32_t> corrupt) {
  connection.send({.kind = MessageKind::kAnswer, .code = static_cast<std::uint8_t>(code), .id = id},
                  encode(AnswerBody{std::move(what), std::move(corrupt)}));
}

Result<void> InboundLink::queue_pull(Lane& lane, const MessageHead& head) {
  if (++lane.num_pulls > kRequestsMax)
    return protocol_error(
        fmt::format("the peer requested {} segments at a time; at most 256 are allowed", lane.num_pulls));
  Pull pull{head.header, {}};
  pull.entries.reserve(head.header.num_entries);
  std::uint64_t bytes = 0;
  for (std::size_t index = 0; index < head.header.num_entries; ++index) {
    pull.entries.push_back(head.entry(index));
    bytes += pull.entries.back().bytes;
  }
  if (bytes > kPayloadMax || bytes == 0)
    return protocol_error(fmt::format("the peer requested {} bytes at a time; allowed: 1 to {}", bytes, kPayloadMax));
  lane.pulls[head.header.priority].push_back(std::move(pull));
  return {};
}

void InboundLink::refuse_pull(Connection& connection, const MessageHeader& pull, const std::string& why) {
  --lanes_[connection.lane()]->num_pulls;
  connection.send({.kind = MessageKind::kData, .flags = kRefused, .id = pull.id, .number = pull.number}, why);
}

void InboundLink::cancel_pull(Lane& lane, std::uint64_t transfer) {
  for (std::deque<Pull>& queue : lane.pulls) {
    std::erase_if(queue, [&](const Pull& pull) {
      if (pull.header.id != transfer) return false;
      refuse_pull(*lane.connection, pull.header, "the transfer was cancelled");
      return true;
    });
  }
}

bool InboundLink::next_message(Connection& connection, OutMessage& out) {
  Lane& lane = *lanes_[connection.lane()];
  const auto queue = std::find_if(lane.pulls.begin(), lane.pulls.end(), [](const auto& one) { return !one.empty(); });
  if (queue == lane.pulls.end()) return false;
  const Pull pull = std::move(queue->front());
  queue->pop_front();
  const MessageHeader& asked = pull.header;
  std::uint64_t bytes = 0;
  for (const Entry& entry : pull.entries) bytes += entry.bytes;
  const auto span = span_of(pull.entries.size(), bytes, [&](auto index) { return pull.entries[index]; });
  TransferTable& transfer_table = host_.transfer_table();
  const RegionId region{asked.region};
  const GrantId grant{asked.grant};
  Result<std::byte*> memory =
      span ? transfer_table.begin_access(region, grant, span->first, span->second - span->first, false, lane.member)
           : Result<std::byte*>(span.error());
  if (!memory) {
    refuse_pull(connection, asked, memory.error().what);
    return true;
  }
  --lane.num_pulls;
  out.access = MemoryAccess(transfer_table, region, grant);
  const MessageHeader header{.kind = MessageKind::kData,
                             .id = asked.id,
                             .number = asked.number,
                             .payload_bytes = static_cast<std::uint32_t>(bytes)};
  append_message(out.head, header);
  for (const Entry& entry : pull.entries) out.parts.push_back({*memory + (entry.offset - span->first), entry.bytes});
  return true;
}

bool InboundLink::check(TimeNs now) {
  bool is_owed = false;
  for (const std::unique_ptr<Lane>& lane : lanes_) {
    if (is_closed_) return false;
    if (!lane->connection->is_in_the_middle()) continue;
    is_owed = true;
    if (const TimeNs silence_ns = now - lane->connection->alive_at(now); silence_ns >= host_.options().silence_ns)
      on_broken(*lane->connection,
                fmt::format(
                    "the peer was silent for {} ms in the middle of a message; the limit is {} ms (setting silence_ms)",
                    silence_ns / kMillisecond, host_.options().silence_ns / kMillisecond));
  }
  return is_owed && !is_closed_;
}

void InboundLink::on_broken(Connection&, const std::string& why) {
  log().debug("tcp: the connections that a peer had opened to this process have ended: {}", why);
  close();
}

void InboundLink::close() {
  if (std::exchange(is_closed_, true)) return;
  for (const std::unique_ptr<Lane>& lane : lanes_) host_.close(*lane->connection);
  over_();
}

}  // namespace kvferry::tcp
