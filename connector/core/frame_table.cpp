#include "connector/core/frame_table.h"

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include "connector/core/promises.h"

namespace kvferry {
namespace {

std::string_view name_of(FrameTable::State state) {
  constexpr std::array<std::string_view, 8> kNames = {"free",  "gathering",    "landing", "filling from its slot",
                                                      "dirty", "writing back", "clean",   "retired"};
  return kNames.at(static_cast<std::size_t>(state));
}

}  // namespace

FrameTable::FrameTable(std::uint32_t num_frames) : frames_(num_frames) {
  for (std::uint32_t i = num_frames; i-- > 0;) free_.push_back(i);
}

std::optional<FrameTable::Reserved> FrameTable::reserve(ChunkRef chunk, State purpose, std::string owner) {
  KVFERRY_CHECK(purpose == State::kGathering || purpose == State::kLanding || purpose == State::kFillingFromSlot,
                "a GPU frame can't be reserved as {}; allowed: gathering, landing, filling from its slot",
                name_of(purpose));
  promise::fenced_reuse(0, !by_slot_.contains(chunk.slot), chunk.slot);
  if (free_.empty()) {
    const auto victim = std::find_if(lru_.begin(), lru_.end(), [&](std::uint32_t i) { return frames_[i].pins == 0; });
    if (victim == lru_.end()) return std::nullopt;
    retire(*victim);
  }
  const std::uint32_t index = free_.back();
  free_.pop_back();
  Frame& frame = frames_[index];
  promise::fenced_reuse(frame.pins, frame.state == State::kFree, chunk.slot);
  frame.state = purpose;
  frame.use += 1;
  frame.chunk = chunk;
  frame.checksum.reset();
  by_slot_[chunk.slot] = index;
  const FrameRef ref{index, frame.use};
  return Reserved{ref, pin(ref, std::move(owner))};
}

std::optional<FrameTable::FrameRef> FrameTable::find(ChunkRef chunk, State state) const {
  const auto found = by_slot_.find(chunk.slot);
  if (found == by_slot_.end()) return std::nullopt;
  const Frame& frame = frames_[found->second];
  if (frame.chunk != chunk || frame.state != state) return std::nullopt;
  return FrameRef{found->second, frame.use};
}

std::optional<FrameTable::FrameRef> FrameTable::find_whole(ChunkRef chunk) const {
  if (const auto clean = find(chunk)) return clean;
  const auto verified = find(chunk, State::kWritingBack);
  return verified && frame(*verified).checksum ? verified : std::nullopt;
}

std::optional<FrameTable::FrameRef> FrameTable::find_growing(ChunkRef chunk) const {
  for (const State state : {State::kGathering, State::kDirty, State::kWritingBack})
    if (const auto found = find(chunk, state)) return found;
  return std::nullopt;
}

const FrameTable::Frame& FrameTable::frame(FrameRef ref) const {
  KVFERRY_CHECK(ref.frame < frames_.size(), "GPU frame {} does not exist: the pool in GPU memory has {} frames",
                ref.frame, frames_.size());
  return frames_[ref.frame];
}

FramePin FrameTable::pin(FrameRef ref, std::string owner) {
  Frame* const frame = current(ref);
  KVFERRY_CHECK(frame != nullptr, "GPU frame {} can't be pinned: its chunk was removed or replaced", ref.frame);
  KVFERRY_CHECK(!owner.empty(), "bounded-hold: a pin of GPU frame {} has no owner", ref.frame);
  frame->pins += 1;
  pins_.emplace(++last_pin_, Pin{ref, std::move(owner)});
  return FramePin{last_pin_};
}

void FrameTable::unpin(FramePin pin) {
  const auto found = pins_.find(pin.value);
  promise::exactly_once(found != pins_.end(), "the end of pin {} of a GPU frame", pin.value);
  const std::uint32_t index = found->second.frame.frame;
  Frame& frame = frames_[index];
  KVFERRY_CHECK(frame.use == found->second.frame.use && frame.pins > 0, "GPU frame {} was reused while it was pinned",
                index);
  pins_.erase(found);
  if (--frame.pins > 0 || frame.state != State::kRetired) return;
  frame.state = State::kFree;
  free_.push_back(index);
}

bool FrameTable::filled(FrameRef ref) {
  Frame* const frame = current(ref);
  if (frame == nullptr) return false;
  if (frame->state != State::kFillingFromSlot)
    return advance(ref, frame->state == State::kLanding ? State::kLanding : State::kGathering, State::kDirty);
  make_clean(ref.frame);
  return true;
}

bool FrameTable::write_back_started(FrameRef ref) { return advance(ref, State::kDirty, State::kWritingBack); }

bool FrameTable::written_back(FrameRef ref) {
  if (!advance(ref, State::kWritingBack, State::kWritingBack)) return false;
  make_clean(ref.frame);
  return true;
}

bool FrameTable::hashed(FrameRef ref, std::uint64_t checksum) {
  Frame* const frame = current(ref);
  if (frame != nullptr) frame->checksum = checksum;
  return frame != nullptr;
}

void FrameTable::touch(FrameRef ref) {
  Frame* const frame = current(ref);
  if (frame != nullptr && frame->state == State::kClean) lru_.splice(lru_.end(), lru_, frame->lru);
}

void FrameTable::drop_slot(std::uint32_t slot) {
  if (const auto found = by_slot_.find(slot); found != by_slot_.end()) retire(found->second);
}

void FrameTable::drop(FrameRef ref) {
  if (current(ref) != nullptr) retire(ref.frame);
}

/// Returns the frame, nullptr if this use of the frame has ended.
FrameTable::Frame* FrameTable::current(FrameRef ref) {
  KVFERRY_CHECK(ref.frame < frames_.size(), "GPU frame {} does not exist: the pool in GPU memory has {} frames",
                ref.frame, frames_.size());
  Frame& frame = frames_[ref.frame];
  const bool is_claimed = frame.state != State::kFree && frame.state != State::kRetired;
  return frame.use == ref.use && is_claimed ? &frame : nullptr;
}

bool FrameTable::advance(FrameRef ref, State from, State to) {
  Frame* const frame = current(ref);
  if (frame == nullptr) return false;
  KVFERRY_CHECK(frame->state == from, "GPU frame {} of pool slot {} is {}, but should be {}", ref.frame,
                frame->chunk.slot, name_of(frame->state), name_of(from));
  frame->state = to;
  return true;
}

void FrameTable::make_clean(std::uint32_t index) {
  frames_[index].state = State::kClean;
  frames_[index].lru = lru_.insert(lru_.end(), index);
}

void FrameTable::retire(std::uint32_t index) {
  Frame& frame = frames_[index];
  by_slot_.erase(frame.chunk.slot);
  if (frame.state == State::kClean) lru_.erase(frame.lru);
  frame.state = frame.pins == 0 ? State::kFree : State::kRetired;
  if (frame.state == State::kFree) free_.push_back(index);
}

}  // namespace kvferry
