#include "connector/runtime/store/gpu_store.h"

#include <algorithm>
#include <utility>

#include "kernels/joined_packer.h"
#include "transport/base/log.h"

namespace kvferry {
namespace {

constexpr std::uint64_t kFrameAlignment = 256;  // alignment of frames, for the GPU's memory accesses

std::uint64_t aligned(std::uint64_t bytes) { return (bytes + kFrameAlignment - 1) / kFrameAlignment * kFrameAlignment; }

}  // namespace

GpuStore::GpuStore(ChunkStoreParts parts, GpuTier tier)
    : parts_(std::move(parts)),
      tier_(std::move(tier)),
      frame_bytes_(aligned(parts_.chunk_bytes)),
      table_(static_cast<std::uint32_t>(std::min<std::uint64_t>(tier_.bytes / frame_bytes_, UINT32_MAX))),
      slot_uses_(parts_.pool.size() / parts_.chunk_bytes) {}

Result<void> GpuStore::start() {
  if (tier_.bytes > 0 && table_.num_frames() == 0) {
    return Error{ErrorCode::kInvalidArgument,
                 fmt::format("gpu_pool_bytes {} is too small; allowed: 0, or room for at least one chunk of {} bytes",
                             tier_.bytes, frame_bytes_)};
  }
  packer_ = KVFERRY_TRY(make_joined_packer(tier_.gpu, parts_.layouts, parts_.formats));
  if (Result<void> pinned = device().pin(parts_.pool); !pinned)
    return std::move(pinned).error().with(
        fmt::format("can't lock the chunk pool of {} bytes in memory for the GPU", parts_.pool.size()));
  is_pinned_ = true;
  for (std::optional<DeviceStream>* stream : {&down_, &up_, &unpack_}) {
    *stream = KVFERRY_TRY(device().make_stream());
  }
  if (table_.num_frames() == 0) return {};
  auto frames = device().allocate(MemoryKind::kDevice, table_.num_frames() * frame_bytes_);
  if (!frames)
    return std::move(frames).error().with(
        fmt::format("can't allocate the pool in GPU memory (gpu_pool_bytes {})", tier_.bytes));
  frames_ = *frames;
  if (tier_.is_landing_place) register_frames();
  return {};
}

void GpuStore::register_frames() {
  MemoryRegion memory{frames_, table_.num_frames() * frame_bytes_};
  memory.device = &device();
  const Result<RegionId> region = tier_.transport.register_region(memory);
  if (region)
    region_ = *region;
  else
    log().info("chunks from other nodes are written to host memory, because transfers can't write to this GPU: {}",
               region.error().what);
}

GpuStore::~GpuStore() {
  if (packing_) works_.push_back(std::move(packing_->work));
  for (Work& work : works_) {
    // Work without an event can't be waited for here. If there are frames, releasing them below waits for the whole
    // device.
    if (is_over(work) || !work.event) continue;
    if (const Result<void> waited = work.event->wait(); !waited)
      log().error("waiting for the GPU to finish its copies of chunks, before their memory is freed, failed: {}",
                  waited.error().what);
  }
  works_.clear();
  if (region_) {
    // The result is ignored, because the transport is already shut down and no longer uses the region.
    [[maybe_unused]] const Result<void> gone = tier_.transport.unregister_region(*region_);
  }
  if (frames_ != nullptr) device().release(MemoryKind::kDevice, frames_);
  if (is_pinned_) device().unpin(parts_.pool);
  for (const std::optional<DeviceStream>& stream : {down_, up_, unpack_})
    if (stream) device().drop_stream(*stream);
}

std::string GpuStore::describe() const {
  if (table_.num_frames() == 0)
    return fmt::format("GPU tier: none; {} packs chunks into host memory", device().describe());
  return fmt::format("GPU tier: {} frames of {:.1f} KiB on {}{}", table_.num_frames(),
                     static_cast<double>(frame_bytes_) / 1024, device().describe(),
                     region_ ? "; chunks from other nodes are written to these frames" : "");
}

std::size_t GpuStore::num_fenced() const {
  const std::lock_guard lock(mutex_);
  std::size_t fenced = 0;
  for (const Work& work : works_) fenced += work.is_reported() ? work.slots.size() : 0;
  return fenced;
}

void GpuStore::use_slot(Work& work, std::uint32_t slot) {
  slot_uses_[slot] += 1;
  work.slots.push_back(slot);
}

bool GpuStore::is_over(Work& work) {
  if (!work.event) {
    Result<DeviceEvent> event = DeviceEvent::record(device(), work.stream);
    if (!event) return false;
    work.event = std::move(*event);
  }
  const Result<bool> reached = work.event->is_reached();
  return reached && *reached;
}

void GpuStore::poll() {
  const TimeNs now = tier_.clock.now();
  leased_.expire(now);
  for (auto work = works_.begin(); work != works_.end();) {
    if (is_over(*work)) {
      end(*work);
      work = works_.erase(work);
      continue;
    }
    report_in_frames(*work);
    if (!work->is_reported() && work->deadline <= now && leaves_blocks_alone(*work))
      give_up(*work,
              fmt::format("the GPU did not finish its copies of chunks within {} ms", tier_.timeout / kMillisecond));
    ++work;
  }
}

/// Takes the checksums of a save's chunks, whose pass has ended. Returns false if the pass does not tell them.
bool GpuStore::take_checksums(Work& work) {
  if (work.has_checksums || work.items.empty()) return true;
  // wait() returns at once, because the pass has ended.
  const Result<std::vector<std::uint64_t>> taken = work.passes.front()->wait();
  work.has_checksums = taken && taken->size() == work.items.size();
  if (!work.has_checksums)
    log().error("saving {} chunks failed, so their KV is not kept: {}", work.items.size(),
                taken ? "the checksums of the saved chunks are missing" : taken.error().what);
  for (std::size_t i = 0; work.has_checksums && i < work.items.size(); ++i) work.items[i].checksum = (*taken)[i];
  return work.has_checksums;
}

/// Reports the chunks of a save that are complete in their frames, once the gather has ended.
void GpuStore::report_in_frames(Work& work) {
  if (work.landed_sums) return verify_landed(work, false);
  if (work.items.empty() || !work.gathered) return;
  if (const Result<bool> reached = work.gathered->is_reached(); !reached || !*reached) return;
  work.gathered.reset();
  if (!take_checksums(work)) return give_up(work, "the checksums of the saved chunks are missing");
  for (const Work::Item& item : work.items)
    if (item.frame && table_.hashed(*item.frame, item.checksum))
      saved_.push_back({item.chunk, true, item.checksum, true});
}

/// Reports the outcome of work that the device has finished, and frees the work's frames and slots.
void GpuStore::end(Work& work) {
  if (work.landed_sums) verify_landed(work, true);
  const bool ok = work.kind != Work::Kind::kSave || take_checksums(work);
  for (const Work::Item& item : work.items) {
    if (item.frame && ok) {
      if (table_.written_back(*item.frame)) table_.hashed(*item.frame, item.checksum);
    } else if (item.frame) {
      table_.drop(*item.frame);
    }
    report(work, item, ok);
  }
  if (work.loads) {
    verify(work);
    report_loads(work);
  }
  release(work);
}

void GpuStore::report(const Work& work, const Work::Item& item, bool ok) {
  const std::uint64_t checksum = ok ? item.checksum : 0;
  if (work.kind == Work::Kind::kLanding)
    landed_.push_back({item.chunk, ok, checksum});
  else
    saved_.push_back({item.chunk, ok, checksum});
}

/// Reports the work as failed. The frames and slots that the device may still touch are not reused until the device has
/// finished the work.
void GpuStore::give_up(Work& work, std::string_view why) {
  const bool is_load = work.loads != nullptr;
  log().error("{} {} chunks failed: {}; {} pool slots are not reused until the GPU has finished with them",
              is_load                             ? "loading"
              : work.kind == Work::Kind::kLanding ? "receiving"
                                                  : "saving",
              is_load ? work.loads->parts.size() : work.items.size(), why, work.slots.size());
  if (is_load) report_loads(work);
  for (const Work::Item& item : work.items) {
    if (item.frame) table_.drop(*item.frame);
    report(work, item, false);
  }
  work.items.clear();
}

void GpuStore::release(Work& work) {
  for (const FramePin pin : work.pins) table_.unpin(pin);
  for (const std::uint32_t slot : work.slots) slot_uses_[slot] -= 1;
  work.pins.clear();
  work.slots.clear();
}

Result<std::unique_ptr<ChunkStore>> make_gpu_store(ChunkStoreParts parts, GpuTier tier) {
  auto store = std::make_unique<GpuStore>(std::move(parts), std::move(tier));
  KVFERRY_TRY(store->start());
  return std::unique_ptr<ChunkStore>(std::move(store));
}

}  // namespace kvferry
