// The chunk store for blocks in GPU memory, with frames of GPU memory besides the slots. Only make_gpu_store() uses
// this class.
//
// The engine's stream, `down_` (frame to slot), `up_` (slot to frame) and `unpack_` (frame or slot to block) run in
// parallel. Wherever bytes pass from one stream to another, an event orders the two streams. The host waits only in the
// destructor.
#pragma once

#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "connector/core/frame_table.h"
#include "connector/core/leased_frames.h"
#include "connector/runtime/store/chunk_store.h"

namespace kvferry {

class GpuStore final : public ChunkStore {
 public:
  GpuStore(ChunkStoreParts parts, GpuTier tier);
  ~GpuStore() override;
  Result<void> start();

  std::string describe() const override;
  void save(const std::vector<SaveJob>& jobs, DeviceStream stream) override;
  void save_layers(const std::vector<SaveJob>& jobs, std::uint32_t end, DeviceStream stream) override;
  std::vector<SavedLayers> take_layers() override;
  bool is_saving_layers() const override;
  std::vector<SaveDone> take_saved() override;
  void load(std::vector<LoadJob> jobs, const IsReadable& is_readable, DeviceStream stream) override;
  std::vector<Loaded> take_loaded() override;
  Result<Place> land(ChunkRef chunk, std::uint64_t bytes) override;
  Result<Place> land_in_slot(ChunkRef chunk, std::uint64_t bytes) override;
  void landed(std::span<const Landed> chunks) override;
  std::vector<Landed> take_landed() override;
  std::optional<Frames> frames() const override;
  std::vector<std::uint32_t> pin_frames(std::uint64_t lease, std::span<const ChunkRef> chunks, TimeNs until,
                                        const std::vector<bool>& are_growing) override;
  void unpin_frames(std::uint64_t lease) override;
  std::size_t num_fenced() const override;

 private:
  using FrameRef = FrameTable::FrameRef;
  using PassPtr = std::unique_ptr<StreamPacker::Pass>;

  struct LoadPart {
    enum class State : std::uint8_t { kUnderWay, kLoaded, kCorrupt, kFailed };
    std::size_t job = 0;  // index in Loads::jobs
    const LoadItem* item = nullptr;
    State state = State::kUnderWay;
    std::byte* chunk = nullptr;
    std::optional<FrameRef> filled;  // the frame that is filled from the slot for this load
    bool wants_checksum = true;
  };
  using LoadParts = std::vector<LoadPart*>;
  struct LoadPass {
    LoadParts parts;
    std::size_t index = 0;  // position in Work::passes
  };
  /// The loads of one step. `parts` and `passes` point into this object.
  struct Loads {
    std::vector<LoadJob> jobs;
    std::vector<LoadPart> parts;
    std::vector<LoadPass> passes;
  };

  /// Work submitted to the device, and the frames and slots that may not be reused until the device has finished it.
  struct Work {
    enum class Kind : std::uint8_t { kSave, kLanding, kLoad };
    Kind kind = Kind::kSave;
    DeviceStream stream = nullptr;  // CUDA stream to which the last piece of work was submitted
    /// Recorded after the last piece of work; empty while the device refuses to record an event.
    std::optional<DeviceEvent> event;
    /// Recorded after the gather of a save with frames; empty once the save's chunks were reported in their frames.
    std::optional<DeviceEvent> gathered;
    std::vector<FramePin> pins;
    std::vector<std::uint32_t> slots;
    std::vector<PassPtr> passes;
    struct Item {
      ChunkRef chunk;
      std::optional<FrameRef> frame;
      std::uint64_t checksum = 0;  // for a save, valid once has_checksums
    };
    std::vector<Item> items;     // chunks to report at the end; empty after the work has been given up
    bool has_checksums = false;  // true once the pass of a save has told the checksums
    /// The computation of the checksums of a landing's chunks that the caller of landed() has not verified.
    std::unique_ptr<Device::Checksums> landed_sums;
    std::unique_ptr<Loads> loads;   // loads to report at the end; nullptr after the work has been given up
    DeviceStream engine = nullptr;  // the engine's stream, in which the engine uses the loads' blocks
    TimeNs deadline = 0;
    bool is_reported() const { return items.empty() && !loads; }
  };
  struct SavePart {
    const SaveJob* job;
    const SaveItem* item;
  };
  /// A save whose layers are being packed.
  struct Packing {
    Work work;
    std::vector<DeviceCopy> down;  // the copies of its frames to their slots
    std::uint32_t num_layers = 0;  // number of layers that are packed
    std::optional<Error> failed{};
  };
  struct LayerGroup {
    DeviceEvent packed;
    SavedLayers saved;
  };
  struct Landing {
    ChunkRef chunk;
    FrameTable::Reserved reserved;
    std::uint64_t bytes = 0;
  };

  std::byte* slot_base(std::uint32_t slot) const { return parts_.pool.data() + slot * parts_.chunk_bytes; }
  std::byte* frame_base(FrameRef frame) const { return frames_ + frame.frame * frame_bytes_; }
  std::uint64_t bytes_of(std::uint32_t tokens) const { return tokens * packer_->chunk_bytes_per_token(); }
  Device& device() const { return *tier_.gpu.device; }
  void register_frames();

  // The caller of each method below must hold mutex_.
  void use_slot(Work& work, std::uint32_t slot);
  bool is_over(Work& work);
  void poll();
  bool take_checksums(Work& work);
  void report_in_frames(Work& work);
  void end(Work& work);
  void report(const Work& work, const Work::Item& item, bool ok);
  void give_up(Work& work, std::string_view why);
  void release(Work& work);

  void pack(std::span<const SavePart> parts, DeviceStream stream);
  Result<Packing> begin_packing(std::span<const SavePart> parts, DeviceStream stream);
  void finish_packing(Packing packing, DeviceStream stream);
  bool finish_layers(const std::vector<SaveJob>& jobs, DeviceStream stream);
  Result<void> enqueue_save(Packing& packing, DeviceStream stream);
  void land_work(Work work, std::span<const DeviceCopy> down, bool is_verified);
  void verify_landed(Work& work, bool is_over);
  Result<void> write_back(Work& work, std::span<const DeviceCopy> down);

  bool is_written_from_frame(std::uint32_t slot) const;
  void start_loads(Work& work);
  void find_sources(Work& work);
  void unpack(const LoadParts& parts, bool wants_checksums, Work& work);
  void verify(Work& work);
  void report_loads(Work& work);
  static bool leaves_blocks_alone(const Work& work);

  ChunkStoreParts parts_;
  GpuTier tier_;
  std::unique_ptr<StreamPacker> packer_;  // declared after tier_, so that the packer is destroyed before the device
  std::uint64_t frame_bytes_ = 0;
  std::byte* frames_ = nullptr;
  bool is_pinned_ = false;
  std::optional<DeviceStream> down_, up_, unpack_;
  std::optional<RegionId> region_;  // region of the frames; empty if no transfer reaches them

  mutable std::mutex mutex_;
  FrameTable table_;
  LeasedFrames leased_{table_};
  std::vector<std::uint32_t> slot_uses_;  // [slot] number of uses of the slot by unfinished Work
  std::list<Work> works_;
  std::optional<Packing> packing_;             // the step's save, while its layers are packed in groups
  std::list<LayerGroup> groups_;               // groups of layers that take_layers() has not returned
  std::map<std::uint32_t, Landing> landings_;  // [slot] the unfinished transfer into a frame for the slot's chunk
  std::vector<SaveDone> saved_;
  std::vector<Loaded> loaded_;
  std::vector<Landed> landed_;
};

}  // namespace kvferry
