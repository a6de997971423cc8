#include "transport/tcp/out_transfer.h"

#include <algorithm>
#include <utility>

namespace kvferry::tcp {

OutTransfer::OutTransfer(AcceptedTransfer accepted) : what_(std::move(accepted)) { add_bytes(0); }

void OutTransfer::feed(const FedCopies& more) {
  const std::size_t first = what_.copies.size();
  what_.append(more);
  add_bytes(first);
}

void OutTransfer::add_bytes(std::size_t first_copy) {
  for (std::size_t copy = first_copy; copy < what_.copies.size(); ++copy) {
    bytes_left_ += what_.copies[copy].bytes;
    // No message will carry an empty range, so its checksum is compared here.
    if (has_checksums() && what_.copies[copy].bytes == 0) verifier.compare_local(copy);
  }
  cursor_.skip_empty_copies(what_.copies);
}

bool OutTransfer::take(std::size_t lane, std::uint64_t bytes_max, Segment& segment) {
  if (const auto found = carries_.find(lane); found != carries_.end()) {
    const Piece piece = found->second.take(what_.copies, bytes_max);
    segment = {piece.copy, piece.at, piece.bytes, 1};
    if (piece.ends_copy) carries_.erase(found);
    bytes_left_ -= segment.bytes;
    return true;
  }
  segment = {cursor_.copy(), cursor_.at(), 0, 0};
  while (!cursor_.is_at_end(what_.copies) && segment.bytes < bytes_max && segment.num_pieces < kEntriesMax) {
    const Piece piece = cursor_.take(what_.copies, bytes_max - segment.bytes);
    segment.bytes += piece.bytes;
    segment.num_pieces += piece.bytes > 0 ? 1 : 0;
  }
  if (cursor_.is_inside_copy() && has_checksums()) {
    carries_[lane] = cursor_;
    cursor_.skip_copy();
  }
  cursor_.skip_empty_copies(what_.copies);
  bytes_left_ -= segment.bytes;
  return segment.bytes > 0;
}

void OutTransfer::check(std::size_t lane, std::size_t copy, std::span<const std::byte> bytes, bool ends_copy) {
  if (const auto digest = digests_[lane].add(bytes, ends_copy)) verifier.compare(copy, *digest);
}

void OutTransfer::append_push(const Segment& segment, OutMessage& out) {
  const bool is_final = is_dealt() && what_.is_complete;
  MessageHeader header{.kind = MessageKind::kPush,
                       .num_entries = segment.num_pieces,
                       .id = what_.id.value,
                       .grant = what_.remote.grant,
                       .region = what_.remote.region,
                       .payload_bytes = static_cast<std::uint32_t>(segment.bytes)};
  if (segment.num_pieces > 0) ++num_segments;
  if (is_final) {
    is_final_sent = true;
    header.flags |= !verifier.has_corrupt() ? kFinal : kFinal | kUnsound;
    header.number = num_segments;
    header.text_bytes = static_cast<std::uint32_t>(what_.notification.size());
  }
  if (has_checksums()) header.flags |= kChecksums;
  append_bytes(out.head, &header, sizeof(header));
  out.transfer = segment.bytes > 0 ? what_.id.value : 0;
  for_each_piece(segment, [&](const Piece& piece) {
    const CopyRange& range = what_.copies[piece.copy];
    const Entry entry{range.remote_offset + piece.at, static_cast<std::uint32_t>(piece.bytes),
                      static_cast<std::uint32_t>(piece.copy) | (piece.ends_copy ? kEndsRange : 0)};
    append_bytes(out.head, &entry, sizeof(entry));
    out.parts.push_back({what_.local_base + range.local_offset + piece.at, piece.bytes});
  });
  if (has_checksums()) {
    for_each_piece(segment, [&](const Piece& piece) {
      append_bytes(out.head, &what_.checksums[piece.copy], sizeof(std::uint64_t));
    });
  }
  if (is_final) out.head += what_.notification;
}

void OutTransfer::append_pull(const Segment& segment, std::uint32_t request, OutMessage& out) const {
  const MessageHeader header{.kind = MessageKind::kPull,
                             .priority = static_cast<std::uint8_t>(what_.priority),
                             .num_entries = segment.num_pieces,
                             .id = what_.id.value,
                             .grant = what_.remote.grant,
                             .region = what_.remote.region,
                             .number = request};
  append_bytes(out.head, &header, sizeof(header));
  for_each_piece(segment, [&](const Piece& piece) {
    const Entry entry{what_.copies[piece.copy].remote_offset + piece.at, static_cast<std::uint32_t>(piece.bytes), 0};
    append_bytes(out.head, &entry, sizeof(entry));
  });
}

}  // namespace kvferry::tcp
