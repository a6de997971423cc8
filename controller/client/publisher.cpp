#include "controller/client/publisher.h"

#include <algorithm>

namespace kvferry::controller {

void Publisher::publish(std::span<const ChunkEntry> chunks, Tier tier) {
  const auto bit = static_cast<std::uint8_t>(1U << static_cast<unsigned>(tier));
  while (!chunks.empty()) {
    const std::span<const ChunkEntry> piece = chunks.first(std::min(wire::kChunksPerPublishMax, chunks.size()));
    chunks = chunks.subspan(piece.size());
    for (const ChunkEntry& chunk : piece) {
      std::uint8_t& tiers = tiers_of_[chunk.key];
      if ((tiers & bit) == 0) digests_[static_cast<std::size_t>(tier)].add(chunk.key);
      tiers |= bit;
    }
    wire::Publish message{
        .incarnation = incarnation_.value, .sequence = next_sequence_, .tier = static_cast<std::uint32_t>(tier)};
    wire::split_entries(piece, message.full, message.tails);
    send(message);
  }
}

void Publisher::evict(std::span<const ChunkKey> keys) {
  while (!keys.empty()) {
    const std::span<const ChunkKey> piece = keys.first(std::min(wire::kChunksPerPublishMax, keys.size()));
    keys = keys.subspan(piece.size());
    for (const ChunkKey& key : piece) {
      const auto found = tiers_of_.find(key);
      if (found == tiers_of_.end()) continue;
      for (std::size_t tier = 0; tier < kNumTiers; ++tier) {
        if ((found->second >> tier & 1U) != 0) digests_[tier].remove(key);
      }
      tiers_of_.erase(found);
    }
    send(wire::Evict{
        .incarnation = incarnation_.value, .sequence = next_sequence_, .keys = {{piece.begin(), piece.end()}}});
  }
}

void Publisher::begin_snapshot() {
  kept_.clear();  // the snapshot replaces everything before it, so no earlier message is sent again
  kept_bytes_ = 0;
  tiers_of_.clear();
  digests_ = TierDigests{};
  snapshot_begun_at_ = next_sequence_;
  send(wire::Publish{
      .incarnation = incarnation_.value, .sequence = next_sequence_, .begins_snapshot = true, .has_end = true});
}

void Publisher::end_snapshot() {
  send(wire::Publish{.incarnation = incarnation_.value, .sequence = next_sequence_, .ends_snapshot = true});
}

Publisher::Answer Publisher::answer(const wire::SnapshotWanted& wanted) {
  const bool has_begun = snapshot_begun_at_.has_value();
  if (has_begun && *snapshot_begun_at_ >= wanted.next_sequence) return Answer::kOnItsWay;
  const std::uint64_t first_kept = next_sequence_ - kept_.size();
  // A snapshot replaces everything before it. So if the message that begins the snapshot is among the missing ones,
  // sending again from that message on is enough.
  const bool begin_is_missing = has_begun && *snapshot_begun_at_ >= wanted.resend_from;
  const std::uint64_t from = begin_is_missing ? *snapshot_begun_at_ : wanted.resend_from;
  if ((!wanted.resend_will_do && !begin_is_missing) || from < first_kept || from >= next_sequence_) {
    begin_snapshot();
    return Answer::kSnapshotBegun;
  }
  for (std::uint64_t i = from - first_kept; i < kept_.size(); ++i) send_(kept_[i]);
  return Answer::kSentAgain;
}

template <class T>
void Publisher::send(const T& message) {
  kept_.push_back(encode(message));
  kept_bytes_ += kept_.back().size();
  ++next_sequence_;
  send_(kept_.back());
  while (kept_bytes_ > resend_bytes_max_) {
    kept_bytes_ -= kept_.front().size();
    kept_.pop_front();
  }
}

}  // namespace kvferry::controller
