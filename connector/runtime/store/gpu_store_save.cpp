// GpuStore's saves (block -> frame -> slot). A chunk goes straight to its slot if no frame is free. save_layers() packs
// the first layers of a step's chunks while the engine computes the later ones.
#include <algorithm>
#include <utility>

#include "connector/runtime/store/gpu_store.h"
#include "transport/base/log.h"

namespace kvferry {

void GpuStore::save(const std::vector<SaveJob>& jobs, DeviceStream stream) {
  const std::lock_guard lock(mutex_);
  poll();  // poll() ends finished work, which frees frames
  if (packing_ && finish_layers(jobs, stream)) return;
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

/// Begins the save with the first group of layers. If it can't begin, save() packs all layers at once, or reports what
/// failed.
void GpuStore::save_layers(const std::vector<SaveJob>& jobs, std::uint32_t end, DeviceStream stream) {
  const std::lock_guard lock(mutex_);
  if (!packing_) {
    poll();
    std::vector<SavePart> parts;
    for (const SaveJob& job : jobs)
      for (const SaveItem& item : job.items) parts.push_back({&job, &item});
    const auto is_used = [&](const SavePart& part) { return slot_uses_[part.item->chunk.slot] > 0; };
    if (parts.empty() || std::ranges::any_of(parts, is_used)) return;
    for (const SavePart& part : parts) table_.drop_slot(part.item->chunk.slot);
    Result<Packing> begun = begin_packing(parts, stream);
    if (!begun) return;
    packing_ = std::move(*begun);
  }
  Packing& packing = *packing_;
  if (packing.failed || end <= packing.num_layers || end >= packer_->num_layers()) return;
  Result<void> copied = packing.work.passes.front()->copy_layers(packing.num_layers, end);
  Result<DeviceEvent> packed = copied ? DeviceEvent::record(device(), stream) : Result<DeviceEvent>(copied.error());
  packing.num_layers = end;
  if (!copied) packing.failed = copied.error();
  if (!packed) return;  // without an event these layers are not reported before the save has ended
  LayerGroup group{std::move(*packed), {{}, end}};
  for (const Work::Item& item : packing.work.items)
    if (item.frame) group.saved.chunks.push_back(item.chunk);
  if (!group.saved.chunks.empty()) groups_.push_back(std::move(group));
}

std::vector<ChunkStore::SavedLayers> GpuStore::take_layers() {
  const std::lock_guard lock(mutex_);
  std::vector<SavedLayers> all;
  for (; !groups_.empty(); groups_.pop_front()) {
    const Result<bool> reached = groups_.front().packed.is_reached();
    if (reached && !*reached) break;
    if (reached) all.push_back(std::move(groups_.front().saved));
  }
  return all;
}

bool GpuStore::is_saving_layers() const {
  const std::lock_guard lock(mutex_);
  return !groups_.empty();
}

/// Ends the save that save_layers() has begun. Returns false if it was another save than that of `jobs`, since a step
/// has ended without save(): that save has failed.
bool GpuStore::finish_layers(const std::vector<SaveJob>& jobs, DeviceStream stream) {
  Packing packing = std::move(*std::exchange(packing_, std::nullopt));
  const ChunkRef first = packing.work.items.front().chunk;
  const bool is_same = !jobs.empty() && !jobs.front().items.empty() && jobs.front().items.front().chunk == first;
  if (!is_same) packing.failed = Error{ErrorCode::kUnavailable, "the engine has ended the step before the save"};
  finish_packing(std::move(packing), stream);
  return is_same;
}

void GpuStore::pack(std::span<const SavePart> parts, DeviceStream stream) {
  Result<Packing> packing = begin_packing(parts, stream);
  if (packing) return finish_packing(std::move(*packing), stream);
  if (packing.error().code == ErrorCode::kInvalidArgument && parts.size() > 1) {  // one of them is bad
    for (std::size_t i = 0; i < parts.size(); ++i) pack(parts.subspan(i, 1), stream);
    return;
  }
  log().error("saving {} chunks, the first of request {}, failed, so their KV is not kept: {}", parts.size(),
              parts.front().job->request_id, packing.error().what);
  for (const auto& [job, item] : parts) saved_.push_back({item->chunk, false, 0});
}

/// Reserves frames, and prepares the gather. After an error no work was given to the GPU, and nothing is reserved.
Result<GpuStore::Packing> GpuStore::begin_packing(std::span<const SavePart> parts, DeviceStream stream) {
  Packing packing;
  Work& work = packing.work;
  work.stream = stream;
  work.deadline = tier_.clock.now() + tier_.timeout;
  std::vector<PackerJob> gathers;
  for (const auto& [job, item] : parts) {
    const std::uint32_t slot = item->chunk.slot;
    std::byte* target = slot_base(slot);
    use_slot(work, slot);
    work.items.push_back({item->chunk, {}});
    if (auto reserved = table_.reserve(item->chunk, FrameTable::State::kGathering, "save of " + job->request_id)) {
      target = frame_base(reserved->frame);
      packing.down.push_back({slot_base(slot), target, bytes_of(item->num_tokens)});
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
  if (!pass) {
    for (const Work::Item& item : work.items)
      if (item.frame) table_.drop(*item.frame);
    release(work);
    return std::move(pass).error();
  }
  work.passes.push_back(std::move(*pass));
  return packing;
}

void GpuStore::finish_packing(Packing packing, DeviceStream stream) {
  if (Result<void> given = enqueue_save(packing, stream); !given) give_up(packing.work, given.error().what);
  works_.push_back(std::move(packing.work));
}

Result<void> GpuStore::enqueue_save(Packing& packing, DeviceStream stream) {
  Work& work = packing.work;
  if (packing.failed) return *packing.failed;
  StreamPacker::Pass& pass = *work.passes.front();
  KVFERRY_TRY(pass.copy_layers(packing.num_layers, packer_->num_layers()));
  KVFERRY_TRY(pass.finish());
  DeviceEvent gathered = KVFERRY_TRY(DeviceEvent::record(device(), stream));
  if (packing.down.empty()) {
    work.event = std::move(gathered);
    return {};
  }
  KVFERRY_TRY(gathered.make_wait(*down_));
  work.gathered = std::move(gathered);
  work.stream = *down_;
  for (const Work::Item& item : work.items)
    if (item.frame) table_.filled(*item.frame);
  return write_back(work, packing.down);
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

std::optional<ChunkStore::Frames> GpuStore::frames() const {
  if (!region_) return std::nullopt;
  return Frames{*region_, frame_bytes_};
}

std::vector<std::uint32_t> GpuStore::pin_frames(std::uint64_t lease, std::span<const ChunkRef> chunks, TimeNs until,
                                                const std::vector<bool>& are_growing) {
  const std::lock_guard lock(mutex_);
  poll();
  return leased_.begin(lease, chunks, until, are_growing);
}

void GpuStore::unpin_frames(std::uint64_t lease) {
  const std::lock_guard lock(mutex_);
  leased_.end(lease);
}

}  // namespace kvferry
