// GpuStore's loads. Each chunk is unpacked from its frame into blocks. A chunk without a frame is first copied from its
// slot into a free frame, or unpacked straight from its slot if no frame is free. Nothing waits on the host: a load is
// reported when the device has finished it, or as failed if it could not be started or has passed its deadline.
#include <algorithm>
#include <map>
#include <utility>

#include "connector/runtime/store/gpu_store.h"
#include "transport/base/log.h"

namespace kvferry {

void GpuStore::load(std::vector<LoadJob> jobs, const IsReadable& is_readable, DeviceStream stream) {
  Work work;
  work.kind = Work::Kind::kLoad;
  work.stream = *unpack_;
  work.engine = stream;
  work.deadline = tier_.clock.now() + tier_.timeout;
  work.loads = std::make_unique<Loads>();
  work.loads->jobs = std::move(jobs);
  for (std::size_t j = 0; j < work.loads->jobs.size(); ++j) {
    for (const LoadItem& item : work.loads->jobs[j].items) {
      LoadPart part;
      part.job = j;
      part.item = &item;
      const bool is_right = is_readable(item.chunk) && parts_.rank < item.checksums.size();
      if (!is_right) part.state = LoadPart::State::kCorrupt;
      work.loads->parts.push_back(part);
      if (!is_right) break;
    }
  }
  const std::lock_guard lock(mutex_);
  poll();
  start_loads(work);
  if (work.passes.empty() && work.slots.empty() && work.pins.empty()) return report_loads(work);
  if (Result<DeviceEvent> event = DeviceEvent::record(device(), *unpack_)) work.event = std::move(*event);
  works_.push_back(std::move(work));
}

/// Returns true if the device may still copy a saved or landed chunk to the slot.
bool GpuStore::is_written_from_frame(std::uint32_t slot) const {
  return std::ranges::any_of(works_, [&](const Work& work) {
    return work.kind != Work::Kind::kLoad && std::ranges::find(work.slots, slot) != work.slots.end();
  });
}

void GpuStore::start_loads(Work& work) {
  const Result<void> ordered = [&]() -> Result<void> {
    const DeviceEvent free = KVFERRY_TRY(DeviceEvent::record(device(), work.engine));
    return free.make_wait(*unpack_);
  }();
  if (!ordered)
    return log().error("loading {} chunks failed, so their tokens are computed again: {}", work.loads->parts.size(),
                       ordered.error().what);
  find_sources(work);
  for (const bool wants_checksums : {false, true}) {
    LoadParts group;
    for (LoadPart& part : work.loads->parts)
      if (part.state == LoadPart::State::kUnderWay && part.wants_checksum == wants_checksums) group.push_back(&part);
    if (!group.empty()) unpack(group, wants_checksums, work);
  }
}

/// Chooses where each chunk is read from: its frame, a free frame that is filled from its slot, or the slot itself.
void GpuStore::find_sources(Work& work) {
  std::map<ChunkRef, FrameRef> filled;  // loads of one step may share a chunk, whose frame is filled once
  std::vector<DeviceCopy> up;
  for (LoadPart& part : work.loads->parts) {
    if (part.state != LoadPart::State::kUnderWay) continue;
    const ChunkRef chunk = part.item->chunk;
    if (const auto shared = filled.find(chunk); shared != filled.end()) {
      part.chunk = frame_base(shared->second);
      continue;
    }
    if (const auto frame = table_.find_whole(chunk)) {
      const std::optional<std::uint64_t> known = table_.frame(*frame).checksum;
      if (known && *known != part.item->checksums[parts_.rank]) {
        part.state = LoadPart::State::kCorrupt;
        table_.drop(*frame);
        continue;
      }
      part.wants_checksum = !known;
      part.chunk = frame_base(*frame);
      work.pins.push_back(table_.pin(*frame, "load of slot " + std::to_string(chunk.slot)));
      table_.touch(*frame);
      continue;
    }
    // If an earlier load fills a frame with the chunk, `unpack_` already waits for that copy.
    if (const auto frame = table_.find_filling(chunk)) {
      part.chunk = frame_base(*frame);
      work.pins.push_back(table_.pin(*frame, "load of slot " + std::to_string(chunk.slot)));
      continue;
    }
    // The copy to the slot has failed since the load was planned, so the frame is gone.
    if (is_written_from_frame(chunk.slot)) {
      part.state = LoadPart::State::kFailed;
      continue;
    }
    use_slot(work, chunk.slot);
    part.chunk = slot_base(chunk.slot);
    table_.drop_slot(chunk.slot);  // drops the frame of the chunk that the slot had before
    const auto reserved =
        table_.reserve(chunk, FrameTable::State::kFillingFromSlot, "filling from slot " + std::to_string(chunk.slot));
    if (!reserved) continue;
    work.pins.push_back(reserved->pin);
    part.filled = reserved->frame;
    part.chunk = frame_base(reserved->frame);
    filled.emplace(chunk, reserved->frame);
    up.push_back({part.chunk, slot_base(chunk.slot), bytes_of(part.item->chunk_tokens)});
  }
  if (up.empty()) return;
  const Result<void> given = [&]() -> Result<void> {
    KVFERRY_TRY(device().copy(up, *up_));
    const DeviceEvent copied = KVFERRY_TRY(DeviceEvent::record(device(), *up_));
    return copied.make_wait(*unpack_);
  }();
  if (given) return;
  log().error("copying {} chunks from host to GPU memory failed, so their tokens are computed again: {}", up.size(),
              given.error().what);
  Work stray;  // keeps the frames and slots in use, because the device may have begun some of the copies
  stray.kind = Work::Kind::kLoad;
  stray.stream = *up_;
  for (const auto& [chunk, frame] : filled) {
    stray.pins.push_back(table_.pin(frame, "filling from slot " + std::to_string(chunk.slot)));
    use_slot(stray, chunk.slot);
    table_.drop(frame);
  }
  works_.push_back(std::move(stray));
  for (LoadPart& part : work.loads->parts)
    if (part.state == LoadPart::State::kUnderWay && filled.contains(part.item->chunk))
      part.state = LoadPart::State::kFailed;
}

void GpuStore::unpack(const LoadParts& parts, bool wants_checksums, Work& work) {
  const std::vector<LoadJob>& jobs = work.loads->jobs;
  std::vector<PackerJob> scatters;
  for (const LoadPart* part : parts) {
    const LoadItem& item = *part->item;
    scatters.push_back({{item.first_token, item.num_tokens, jobs[part->job].block_ids},
                        part->chunk,
                        bytes_of(item.chunk_tokens),
                        item.chunk_tokens,
                        item.skip_tokens,
                        part->chunk == slot_base(item.chunk.slot) ? MemoryKind::kPinned : MemoryKind::kDevice});
  }
  const auto fail = [&](const Error& error) {
    const std::string& request = jobs[parts.front()->job].request_id;
    log().error("loading {} chunks, the first for request {}, failed, so their tokens are computed again: {}",
                parts.size(), request, error.what);
    for (LoadPart* part : parts) part->state = LoadPart::State::kFailed;
  };
  Result<PassPtr> pass = packer_->scatter(scatters, *unpack_, wants_checksums);
  if (!pass && pass.error().code == ErrorCode::kInvalidArgument && parts.size() > 1) {
    for (LoadPart* part : parts) unpack({part}, wants_checksums, work);
    return;
  }
  if (!pass) return fail(pass.error());
  work.passes.push_back(std::move(*pass));
  StreamPacker::Pass& given = *work.passes.back();
  if (auto ok = given.copy_layers(0, packer_->num_layers()); !ok) return fail(ok.error());
  if (auto ok = given.finish(); !ok) return fail(ok.error());
  work.loads->passes.push_back({parts, work.passes.size() - 1});
}

/// Compares the checksums of the chunks that the work has unpacked. The work's passes must have ended.
void GpuStore::verify(Work& work) {
  for (const LoadPass& pass : work.loads->passes) {
    // wait() returns at once, because the pass has ended.
    const Result<std::vector<std::uint64_t>> checksums = work.passes[pass.index]->wait();
    if (!checksums)
      log().error("reading the checksums of {} loaded chunks failed, so their tokens are computed again: {}",
                  pass.parts.size(), checksums.error().what);
    for (std::size_t i = 0; checksums && i < pass.parts.size(); ++i) {
      LoadPart& part = *pass.parts[i];
      const std::uint64_t wanted = part.item->checksums[parts_.rank];
      const bool is_right = !part.wants_checksum || (i < checksums->size() && (*checksums)[i] == wanted);
      part.state = is_right ? LoadPart::State::kLoaded : LoadPart::State::kCorrupt;
      if (!part.filled || !is_right) continue;
      if (table_.filled(*part.filled)) table_.hashed(*part.filled, wanted);
    }
  }
}

/// Reports what became of the work's loads: those that are not verified by now have failed.
void GpuStore::report_loads(Work& work) {
  std::vector<LoadOutcome> outcomes(work.loads->jobs.size());
  std::vector<bool> has_stopped(outcomes.size(), false);
  for (const LoadPart& part : work.loads->parts) {
    if (part.filled && part.state != LoadPart::State::kLoaded) table_.drop(*part.filled);
    if (has_stopped[part.job]) continue;
    has_stopped[part.job] = part.state != LoadPart::State::kLoaded;
    if (part.state == LoadPart::State::kLoaded) outcomes[part.job].tokens_loaded += part.item->num_tokens;
    if (part.state == LoadPart::State::kCorrupt) outcomes[part.job].corrupt.push_back(part.item->chunk);
  }
  for (std::size_t i = 0; i < outcomes.size(); ++i)
    loaded_.push_back({std::move(work.loads->jobs[i]), std::move(outcomes[i])});
  work.loads.reset();
}

/// Returns true if the engine may use the blocks of work that the device has not finished: the work scatters into no
/// block, or this call has made later work of the engine's stream wait for it.
bool GpuStore::leaves_blocks_alone(const Work& work) {
  return work.kind != Work::Kind::kLoad || work.passes.empty() || (work.event && work.event->make_wait(work.engine));
}

std::vector<ChunkStore::Loaded> GpuStore::take_loaded() {
  const std::lock_guard lock(mutex_);
  poll();
  return std::exchange(loaded_, {});
}

}  // namespace kvferry
