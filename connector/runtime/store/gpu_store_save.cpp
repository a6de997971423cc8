// GpuStore's saves (block -> frame -> slot) and landings of chunks from other nodes (transfer -> frame -> slot). A
// chunk goes straight to its slot if no frame is free, or if its transfer can't write to frames.
#include <utility>

#include "connector/runtime/store/gpu_store.h"
#include "transport/base/log.h"

namespace kvferry {

void GpuStore::save(const std::vector<SaveJob>& jobs, DeviceStream stream) {
  const std::lock_guard lock(mutex_);
  poll();  // poll() ends finished work, which frees frames
  std::vector<SavePart> parts;
  for (const SaveJob& job : jobs) {
    for (const SaveItem& item : job.items) {
      const std::uint32_t slot = item.chunk.slot;
      table_.drop_slot(slot);
      if (slot_uses_[slot] == 0) {
        parts.push_back({&job, &item});
        continue;
      }
      log().error(
          "saving {} tokens of request {} failed, so their KV is not kept: the GPU still copies from or to pool slot "
          "{}",
          item.num_tokens, job.request_id, slot);
      saved_.push_back({item.chunk, false, 0});
    }
  }
  if (!parts.empty()) pack(parts, stream);
}

void GpuStore::pack(std::span<const SavePart> parts, DeviceStream stream) {
  Work work;
  work.stream = stream;
  work.deadline = tier_.clock.now() + tier_.timeout;
  std::vector<PackerJob> gathers;
  std::vector<DeviceCopy> down;
  for (const auto& [job, item] : parts) {
    const std::uint32_t slot = item->chunk.slot;
    std::byte* target = slot_base(slot);
    use_slot(work, slot);
    work.items.push_back({item->chunk, {}});
    if (auto reserved = table_.reserve(item->chunk, FrameTable::State::kGathering, "save of " + job->request_id)) {
      target = frame_base(reserved->frame);
      down.push_back({slot_base(slot), target, bytes_of(item->num_tokens)});
      work.items.back().frame = reserved->frame;
      work.pins.push_back(reserved->pin);
    }
    gathers.push_back({{item->first_token, item->num_tokens, job->block_ids},
                       target,
                       bytes_of(item->num_tokens),
                       item->num_tokens,
                       0,
                       work.items.back().frame ? MemoryKind::kDevice : MemoryKind::kPinned});
  }
  Result<PassPtr> pass = packer_->gather(gathers, stream, true);
  if (!pass) {  // no work was given to the GPU
    const bool is_one_bad = pass.error().code == ErrorCode::kInvalidArgument && parts.size() > 1;
    if (!is_one_bad)
      log().error("saving {} chunks, the first of request {}, failed, so their KV is not kept: {}", parts.size(),
                  parts.front().job->request_id, pass.error().what);
    for (const Work::Item& item : work.items) {
      if (item.frame) table_.drop(*item.frame);
      if (!is_one_bad) report(work, item, false);
    }
    release(work);
    for (std::size_t i = 0; is_one_bad && i < parts.size(); ++i) pack(parts.subspan(i, 1), stream);
    return;
  }
  work.passes.push_back(std::move(*pass));
  if (Result<void> given = enqueue_save(work, down, stream); !given) give_up(work, given.error().what);
  works_.push_back(std::move(work));
}

Result<void> GpuStore::enqueue_save(Work& work, std::span<const DeviceCopy> down, DeviceStream stream) {
  StreamPacker::Pass& pass = *work.passes.front();
  KVFERRY_TRY(pass.copy_layers(0, packer_->num_layers()));
  KVFERRY_TRY(pass.finish());
  DeviceEvent gathered = KVFERRY_TRY(DeviceEvent::record(device(), stream));
  if (down.empty()) {
    work.event = std::move(gathered);
    return {};
  }
  KVFERRY_TRY(gathered.make_wait(*down_));
  work.gathered = std::move(gathered);
  work.stream = *down_;
  for (const Work::Item& item : work.items)
    if (item.frame) table_.filled(*item.frame);
  return write_back(work, down);
}

/// Copies the work's frames, which are complete, to their slots.
Result<void> GpuStore::write_back(Work& work, std::span<const DeviceCopy> down) {
  KVFERRY_TRY(device().copy(down, *down_));
  for (const Work::Item& item : work.items)
    if (item.frame) table_.write_back_started(*item.frame);
  work.event = KVFERRY_TRY(DeviceEvent::record(device(), *down_));
  return {};
}

std::vector<SaveDone> GpuStore::take_saved() {
  const std::lock_guard lock(mutex_);
  poll();
  return std::exchange(saved_, {});
}

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
  Work work;
  work.kind = Work::Kind::kLanding;
  work.stream = *down_;
  work.deadline = tier_.clock.now() + tier_.timeout;
  std::vector<DeviceCopy> down;
  for (const Landed& chunk : chunks) {
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
  if (work.items.empty()) return;
  if (Result<void> given = write_back(work, down); !given) {
    give_up(work, given.error().what);
  } else {
    for (const Work::Item& item : work.items) {
      table_.hashed(*item.frame, item.checksum);
      landed_.push_back({item.chunk, true, item.checksum, true});
    }
  }
  works_.push_back(std::move(work));
}

std::optional<ChunkStore::Frames> GpuStore::frames() const {
  if (!region_) return std::nullopt;
  return Frames{*region_, frame_bytes_};
}

std::vector<std::uint32_t> GpuStore::pin_frames(std::uint64_t lease, std::span<const ChunkRef> chunks, TimeNs until) {
  const std::lock_guard lock(mutex_);
  poll();
  return leased_.begin(lease, chunks, until);
}

void GpuStore::unpin_frames(std::uint64_t lease) {
  const std::lock_guard lock(mutex_);
  leased_.end(lease);
}

std::vector<ChunkStore::Landed> GpuStore::take_landed() {
  const std::lock_guard lock(mutex_);
  poll();
  return std::exchange(landed_, {});
}

}  // namespace kvferry
