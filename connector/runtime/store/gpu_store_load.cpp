// GpuStore's loads. Each chunk is unpacked from its frame into blocks. A chunk without a frame is first copied from its
// slot into a free frame, or unpacked straight from its slot if no frame is free.
#include <utility>

#include "connector/runtime/store/gpu_store.h"
#include "transport/base/log.h"

namespace kvferry {

std::vector<LoadOutcome> GpuStore::load(const std::vector<LoadJob>& jobs, const IsReadable& is_readable,
                                        DeviceStream stream) {
  std::vector<LoadPart> parts;
  for (std::size_t j = 0; j < jobs.size(); ++j) {
    for (const LoadItem& item : jobs[j].items) {
      LoadPart part;
      part.job = j;
      part.item = &item;
      const bool is_right = is_readable(item.chunk) && parts_.rank < item.checksums.size();
      if (!is_right) part.state = LoadPart::State::kCorrupt;
      parts.push_back(part);
      if (!is_right) break;
    }
  }
  Work work;
  work.kind = Work::Kind::kLoad;
  work.stream = stream;
  std::vector<LoadPass> passes;
  {
    const std::lock_guard lock(mutex_);
    poll();
    find_sources(parts, work, stream);
    for (const bool wants_checksums : {false, true}) {
      LoadParts group;
      for (LoadPart& part : parts)
        if (part.state == LoadPart::State::kUnderWay && part.wants_checksum == wants_checksums) group.push_back(&part);
      if (!group.empty()) unpack(jobs, group, wants_checksums, work, stream, passes);
    }
    if (!work.passes.empty() || !work.slots.empty()) {
      Result<DeviceEvent> event = DeviceEvent::record(device(), stream);
      if (event) work.event = std::move(*event);
    }
  }
  bool is_over = work.passes.empty() && work.slots.empty();
  if (work.event) {
    // The wait does not hold the lock, because chunks from other nodes may arrive meanwhile.
    const Result<void> waited = work.event->wait();
    if (!waited) log().error("waiting for the GPU to load chunks failed: {}", waited.error().what);
    is_over = static_cast<bool>(waited);
  }
  const std::lock_guard lock(mutex_);
  if (is_over) verify(passes, work);
  for (LoadPart& part : parts) {
    if (part.state == LoadPart::State::kUnderWay) part.state = LoadPart::State::kFailed;
    if (part.filled && part.state != LoadPart::State::kLoaded) table_.drop(*part.filled);
  }
  if (is_over)
    release(work);
  else
    works_.push_back(std::move(work));

  std::vector<LoadOutcome> outcomes(jobs.size());
  std::vector<bool> has_stopped(jobs.size(), false);
  for (const LoadPart& part : parts) {
    if (has_stopped[part.job]) continue;
    has_stopped[part.job] = part.state != LoadPart::State::kLoaded;
    if (part.state == LoadPart::State::kLoaded) outcomes[part.job].tokens_loaded += part.item->num_tokens;
    if (part.state == LoadPart::State::kCorrupt) outcomes[part.job].corrupt.push_back(part.item->chunk);
  }
  return outcomes;
}

/// Chooses where each chunk is read from: its frame, a free frame that is filled from its slot, or the slot itself.
void GpuStore::find_sources(std::vector<LoadPart>& parts, Work& work, DeviceStream stream) {
  std::map<ChunkRef, FrameRef> filled;  // loads of one step may share a chunk, whose frame is filled once
  std::vector<DeviceCopy> up;
  for (LoadPart& part : parts) {
    if (part.state != LoadPart::State::kUnderWay) continue;
    const ChunkRef chunk = part.item->chunk;
    if (const auto frame = table_.find(chunk)) {
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
    if (const auto shared = filled.find(chunk); shared != filled.end()) {
      part.chunk = frame_base(shared->second);
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
    DeviceEvent is_up = KVFERRY_TRY(DeviceEvent::record(device(), *up_));
    return is_up.make_wait(stream);
  }();
  if (given) return;
  log().error("copying {} chunks from host to GPU memory failed: {}", up.size(), given.error().what);
  Work stray;  // keeps the frames and slots in use, because the device may have begun some of the copies
  stray.kind = Work::Kind::kLoad;
  stray.stream = *up_;
  for (const auto& [chunk, frame] : filled) {
    stray.pins.push_back(table_.pin(frame, "filling from slot " + std::to_string(chunk.slot)));
    use_slot(stray, chunk.slot);
  }
  works_.push_back(std::move(stray));
  for (LoadPart& part : parts)
    if (part.state == LoadPart::State::kUnderWay && filled.contains(part.item->chunk))
      part.state = LoadPart::State::kFailed;
}

void GpuStore::unpack(const std::vector<LoadJob>& jobs, const LoadParts& parts, bool wants_checksums, Work& work,
                      DeviceStream stream, std::vector<LoadPass>& passes) {
  std::vector<PackerJob> scatters;
  for (const LoadPart* part : parts) {
    const LoadItem& item = *part->item;
    scatters.push_back({{item.first_token, item.num_tokens, jobs[part->job].block_ids},
                        part->chunk,
                        bytes_of(item.chunk_tokens),
                        item.chunk_tokens,
                        item.skip_tokens});
  }
  const auto fail = [&](const Error& error) {
    const std::string& request = jobs[parts.front()->job].request_id;
    log().error("loading {} chunks of request {} and others failed: {}", parts.size(), request, error.what);
    for (LoadPart* part : parts) part->state = LoadPart::State::kFailed;
  };
  Result<PassPtr> pass = packer_->scatter(scatters, stream, wants_checksums);
  if (!pass && pass.error().code == ErrorCode::kInvalidArgument && parts.size() > 1) {
    for (LoadPart* part : parts) unpack(jobs, {part}, wants_checksums, work, stream, passes);
    return;
  }
  if (!pass) return fail(pass.error());
  work.passes.push_back(std::move(*pass));
  StreamPacker::Pass& given = *work.passes.back();
  if (auto ok = given.copy_layers(0, static_cast<std::uint32_t>(parts_.layout.layers.size())); !ok)
    return fail(ok.error());
  if (auto ok = given.finish(); !ok) return fail(ok.error());
  passes.push_back({parts, work.passes.size() - 1});
}

/// Compares the checksums of passes that have all ended.
void GpuStore::verify(const std::vector<LoadPass>& passes, Work& work) {
  for (const LoadPass& pass : passes) {
    const Result<std::vector<std::uint64_t>> checksums = work.passes[pass.index]->wait();
    if (!checksums) log().error("verifying {} chunks failed: {}", pass.parts.size(), checksums.error().what);
    for (std::size_t i = 0; checksums && i < pass.parts.size(); ++i) {
      LoadPart& part = *pass.parts[i];
      const std::uint64_t wanted = part.item->checksums[parts_.rank];
      const bool is_right = !part.wants_checksum || (i < checksums->size() && (*checksums)[i] == wanted);
      part.state = is_right ? LoadPart::State::kLoaded : LoadPart::State::kCorrupt;
      if (!part.filled || !is_right) continue;
      table_.filled(*part.filled);
      table_.hashed(*part.filled, wanted);
    }
  }
}

}  // namespace kvferry
