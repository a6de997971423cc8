// GpuStore's landings of chunks from other nodes (transfer -> frame -> slot). A chunk goes straight to its slot if no
// frame is free, or if its transfer can't write to frames.
#include <utility>

#include "connector/runtime/store/gpu_store.h"
#include "transport/base/log.h"

namespace kvferry {

Result<ChunkStore::Place> GpuStore::land(ChunkRef chunk, std::uint64_t bytes) {
  {
    const std::lock_guard lock(mutex_);
    if (landings_.contains(chunk.slot))
      return Error{ErrorCode::kFull,
                   fmt::format("a transfer already writes the GPU frame of pool slot {}", chunk.slot)};
  }
  Result<Place> slot = land_in_slot(chunk, bytes);
  if (!slot || !region_) return slot;
  const std::lock_guard lock(mutex_);
  const auto reserved =
      table_.reserve(chunk, FrameTable::State::kLanding, fmt::format("landing in slot {}", chunk.slot));
  if (!reserved) return slot;
  landings_.insert({chunk.slot, {chunk, *reserved, bytes}});
  return Place{*region_, reserved->frame.frame * frame_bytes_};
}

Result<ChunkStore::Place> GpuStore::land_in_slot(ChunkRef chunk, std::uint64_t) {
  const std::lock_guard lock(mutex_);
  poll();
  if (const auto failed = landings_.find(chunk.slot); failed != landings_.end() && failed->second.chunk == chunk) {
    table_.drop(failed->second.reserved.frame);
    table_.unpin(failed->second.reserved.pin);
    landings_.erase(failed);
  }
  table_.drop_slot(chunk.slot);
  if (slot_uses_[chunk.slot] > 0 || landings_.contains(chunk.slot))
    return Error{ErrorCode::kFull,
                 fmt::format("the GPU still copies from or to pool slot {}, or a transfer writes the slot's GPU frame",
                             chunk.slot)};
  return Place{parts_.pool_region, chunk.slot * parts_.chunk_bytes};
}

void GpuStore::landed(std::span<const Landed> chunks) {
  const std::lock_guard lock(mutex_);
  for (const bool is_verified : {true, false}) {
    Work work;
    work.kind = Work::Kind::kLanding;
    work.stream = *down_;
    work.deadline = tier_.clock.now() + tier_.timeout;
    std::vector<DeviceCopy> down;
    for (const Landed& chunk : chunks) {
      if (chunk.is_verified != is_verified) continue;
      const auto found = landings_.find(chunk.chunk.slot);
      // If there is no landing in a frame for the chunk, the transfer wrote straight into the slot.
      if (found == landings_.end() || found->second.chunk != chunk.chunk) {
        landed_.push_back(chunk);
        continue;
      }
      const Landing landing = found->second;
      landings_.erase(found);
      if (!chunk.ok) {
        table_.drop(landing.reserved.frame);
        table_.unpin(landing.reserved.pin);
        landed_.push_back(chunk);
        continue;
      }
      table_.filled(landing.reserved.frame);
      work.pins.push_back(landing.reserved.pin);
      work.items.push_back({chunk.chunk, landing.reserved.frame, chunk.checksum});
      use_slot(work, chunk.chunk.slot);
      down.push_back({slot_base(chunk.chunk.slot), frame_base(landing.reserved.frame), landing.bytes});
    }
    if (!work.items.empty()) land_work(std::move(work), down, is_verified);
  }
}

/// Copies chunks that have landed in frames to their slots, and computes their checksums unless `is_verified`.
void GpuStore::land_work(Work work, std::span<const DeviceCopy> down, bool is_verified) {
  const auto give = [&]() -> Result<void> {
    if (!is_verified) {
      std::vector<std::span<const std::byte>> ranges;
      for (const DeviceCopy& copy : down) ranges.push_back({copy.from, copy.bytes});
      work.landed_sums = KVFERRY_TRY(device().checksums(ranges, *down_));
    }
    return write_back(work, down);
  };
  if (Result<void> given = give(); !given) {
    work.landed_sums.reset();
    give_up(work, given.error().what);
  } else {
    for (const Work::Item& item : work.items) {
      if (!is_verified) continue;
      table_.hashed(*item.frame, item.checksum);
      landed_.push_back({item.chunk, true, item.checksum, true});
    }
  }
  works_.push_back(std::move(work));
}

/// Compares the checksums of chunks that have landed, once the GPU has computed them; `is_over`: it has. Reports the
/// good chunks in their frames, and the others as failed.
void GpuStore::verify_landed(Work& work, bool is_over) {
  if (const Result<bool> done = work.landed_sums->is_done(); !is_over && (!done || !*done)) return;
  const Result<std::vector<std::uint64_t>> sums = std::exchange(work.landed_sums, nullptr)->take();
  std::vector<Work::Item> good;
  for (std::size_t i = 0; i < work.items.size(); ++i) {
    const Work::Item& item = work.items[i];
    if (sums && i < sums->size() && (*sums)[i] == item.checksum && table_.hashed(*item.frame, item.checksum)) {
      landed_.push_back({item.chunk, true, item.checksum, true});
      good.push_back(item);
      continue;
    }
    log().error("a chunk that came from another GPU layer by layer is dropped: {}",
                sums ? "its checksum does not match" : sums.error().what);
    table_.drop(*item.frame);
    report(work, item, false);
  }
  work.items = std::move(good);
}

std::vector<ChunkStore::Landed> GpuStore::take_landed() {
  const std::lock_guard lock(mutex_);
  poll();
  return std::exchange(landed_, {});
}

}  // namespace kvferry
