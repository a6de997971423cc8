// What a rank's pool and frames hold, as other nodes write and read them.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "sim_worker.h"

namespace kvferry::sim {

void Worker::start_write(Slot& slot, ChunkRef chunk, const char* how) {
  if (chunk.generation <= slot.generation)
    throw Broken(fmt::format("fenced-reuse: slot {} is {} in generation {} after {}", chunk.slot, how, chunk.generation,
                             slot.generation));
  if (slot.is_in_frame_only)
    throw Broken(
        fmt::format("fenced-reuse: slot {} is {} while a chunk is copied to it from a frame", chunk.slot, how));
  if (is_growing({chunk.slot, slot.generation}))
    throw Broken(fmt::format("fenced-reuse: slot {} is {} while its chunk grows in a frame", chunk.slot, how));
  slot = {chunk.generation, {}, {}};
  frames_->drop(chunk.slot);
}

void Worker::reached_frame(PushedSave pushed) {
  pushed_late_[pushed.chunk] = pushed;
  pushed.is_in_frame = true;
  pushed_.push_back(pushed);
}

void Worker::pack(ChunkRef chunk, std::uint32_t num_layers) {
  const Growth& growth = growing_.at(chunk);
  const std::size_t size = layers_stamps(num_layers, growth.item.num_tokens);
  frames_->put(chunk, 0, std::span(growth.stamps).first(std::min(size, growth.stamps.size())));
}

void Worker::end_growth(ChunkRef chunk) {
  pack(chunk, shard_.num_layers);
  const Growth growth = growing_.extract(chunk).mapped();
  const std::uint64_t checksum = checksum_of(growth.stamps);
  frames_->end(chunk, growth.ok, checksum);
  slots_[chunk.slot].is_in_frame_only = growth.ok;
  grown_.push_back({chunk, growth.ok, checksum, growth.ok});
  const PushedSave pushed{growth.item.push, growth.item.push_index, chunk, growth.ok, checksum};
  if (growth.ok)
    reached_frame(pushed);
  else
    pushed_.push_back(pushed);
}

std::vector<Stamp> Worker::read_slot(std::uint32_t slot) const {
  return slot < slots_.size() ? slots_[slot].stamps : std::vector<Stamp>{};
}

bool Worker::write_pulled(const PullItem& item, const std::vector<Stamp>& bytes) {
  Slot& slot = slots_.at(item.local.slot);
  start_write(slot, item.local, "pulled into");
  slot.stamps = bytes;
  return bytes.size() == chunk_stamps(item.num_tokens) && checksum_of(bytes) == item.checksums.at(rank_);
}

std::uint64_t Worker::write_runs(const PullItem& item, const std::vector<Stamp>& bytes) {
  Slot& slot = slots_.at(item.local.slot);
  start_write(slot, item.local, "pulled into");
  slot.stamps = bytes;
  return checksum_of(bytes);
}

bool Worker::move_to_frame(ChunkRef chunk, std::uint64_t checksum) {
  Slot& slot = slots_.at(chunk.slot);
  slot.is_in_frame_only = frames_->write(chunk, FrameTable::State::kLanding, slot.stamps, checksum);
  if (slot.is_in_frame_only) slot.stamps.clear();
  return slot.is_in_frame_only;
}

bool Worker::begin_landing(const PullItem& item) {
  start_write(slots_.at(item.local.slot), item.local, "pulled into");
  return frames_->begin(item.local, FrameTable::State::kLanding, chunk_stamps(item.num_tokens));
}

bool Worker::end_landing(ChunkRef chunk, std::optional<std::uint64_t> checksum) {
  const bool ok = checksum && checksum_of(frames_->filled(chunk)) == *checksum;
  frames_->end(chunk, ok, checksum.value_or(0));
  slots_.at(chunk.slot).is_in_frame_only = ok;
  return ok;
}

void Worker::slot_written(ChunkRef chunk, bool ok) {
  Slot& slot = slots_.at(chunk.slot);
  const std::vector<Stamp>* const stamps = frames_->find(chunk);
  if (stamps == nullptr || !std::exchange(slot.is_in_frame_only, false))
    throw Broken(fmt::format("fenced-reuse: the frame of slot {} is gone before it is copied to the slot", chunk.slot));
  if (ok) slot.stamps = *stamps;
  slot.is_lost = !ok;
  frames_->written_back(chunk, ok);
  const auto pushed = pushed_late_.extract(chunk);
  if (!pushed) return;
  pushed_.push_back(pushed.mapped());
  pushed_.back().ok = ok;
}

void Worker::write_pushed(ChunkRef local, const std::vector<Stamp>& bytes) {
  Slot& slot = slots_.at(local.slot);
  start_write(slot, local, "pushed into");
  slot.stamps = bytes;
}

std::vector<Stamp> Worker::as_written(std::uint32_t slot) const {
  std::vector<Stamp> stamps = slots_[slot].stamps;
  for (const std::size_t at : slots_[slot].damaged_at) stamps[at] ^= 1;
  return stamps;
}

std::vector<Stamp> Worker::plain(std::uint32_t slot) const {
  std::vector<Stamp> stamps = as_written(slot);
  const Cell& first = cells_[0];
  if (!first.is_part()) {
    const std::size_t num_tokens = has_parts() ? groups_[0].block_tokens : stamps.size() / cells_.size();
    stamps.resize(num_tokens);
    for (Stamp& stamp : stamps)
      if (stamp != 0) stamp ^= first.token_mask;
    return stamps;
  }
  std::vector<Stamp> last(groups_[0].block_tokens, 0);  // a state shows the stamp of the last token alone
  if (stamps.at(0) != 0) last.back() = stamps[0] ^ first.mask(0);
  return last;
}

std::optional<std::string> Worker::find_wrong(std::uint32_t slot, const std::vector<Stamp>& plain) const {
  if (!has_parts()) return std::nullopt;
  const std::vector<Stamp> stamps = as_written(slot);
  if (stamps.size() != chunk_stamps(groups_[0].block_tokens)) return "the chunk's size";
  std::optional<bool> has_state;
  std::size_t at = 0;
  for (const Cell& cell : cells_) {
    for (std::size_t i = 0; i < cell.num_stamps(groups_[0].block_tokens); ++i) {
      const Stamp stamp = stamps[at++], expected = cell.is_part() ? plain.back() : plain.at(i);
      if (cell.is_padding) continue;
      const bool is_there = stamp != 0;
      const bool is_halved = cell.is_part() && has_state.value_or(is_there) != is_there;
      if (cell.is_part()) has_state = is_there;
      const bool is_left_out = !is_there && cell.is_part();
      if (is_halved || (!is_left_out && expected != 0 && stamp != (expected ^ cell.mask(i))))
        return fmt::format("byte {} of part {} of layer {}", cell.first + i, cell.part, cell.layer);
    }
  }
  return std::nullopt;
}

std::uint64_t Worker::slot_checksum(std::uint32_t slot) const { return checksum_of(as_written(slot)); }

bool Worker::damage(std::uint32_t slot) {
  std::vector<Stamp>& stamps = slots_[slot].stamps;
  if (stamps.empty()) return false;
  const std::size_t at = rng_() % stamps.size();
  stamps[at] ^= 1;
  slots_[slot].damaged_at.push_back(at);
  return true;
}

}  // namespace kvferry::sim
