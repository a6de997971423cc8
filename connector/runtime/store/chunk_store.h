// The store of one rank's chunks. Chunks are in the pool's slots, which other nodes read, and perhaps also in frames:
// places for chunks in GPU memory. The store copies chunks to and from the engine's blocks, in the order of the
// engine's stream. The arrival of a chunk from another node is a landing: land() begins a landing, take_landed()
// reports its end.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "connector/core/worker_core.h"
#include "kernels/stream_packer.h"
#include "transport/base/clock.h"
#include "transport/transport.h"

namespace kvferry {

/// The store of one rank. The methods for the engine's steps are called on one thread; any thread may call the others.
/// No method throws. Work that a device refuses is reported as a failed save, load or landing.
class ChunkStore {
 public:
  virtual ~ChunkStore() = default;
  /// Describes the store's use of a GPU, for the log. Returns an empty text if the store uses no GPU.
  virtual std::string describe() const = 0;

  // ---- the engine's steps, on one thread ----
  /// Packs the KV that the stream has computed so far; later work in the stream may overwrite the blocks. take_saved()
  /// reports the end of each item once, in this step or a later one.
  virtual void save(const std::vector<SaveJob>& jobs, DeviceStream stream) = 0;
  /// Packs one layer of a save. The caller packs the layers in order, from 0, and then calls save(), which packs the
  /// chunk again only if a layer is missing. Returns the chunk_checksum() of the layer's bytes in the slot. Errors:
  /// kUnavailable if this store packs all layers at once, kInvalidArgument if `layer` is not the next one, and those of
  /// the packer.
  virtual Result<std::uint64_t> save_layer(const SaveJob& job, const SaveItem& item, std::uint32_t layer) {
    (void)job, (void)item, (void)layer;
    return Error{ErrorCode::kUnavailable, "this chunk store packs all layers of a chunk at once, not single layers"};
  }
  /// Packs layers [those packed so far, `end`) of all chunks of a step's save into their frames, after the work that
  /// the stream has so far. save() with the same jobs packs the layers that are left. Does nothing if this store packs
  /// all layers at once.
  virtual void save_layers(const std::vector<SaveJob>& jobs, std::uint32_t end, DeviceStream stream) {
    (void)jobs, (void)end, (void)stream;
  }
  /// Chunks whose first `num_layers` layers are in their frames.
  struct SavedLayers {
    std::vector<ChunkRef> chunks;
    std::uint32_t num_layers = 0;
  };
  /// Returns what save_layers() has packed, each group of layers once, when the GPU has packed it. Any thread.
  virtual std::vector<SavedLayers> take_layers() { return {}; }
  /// Returns true if take_layers() will return more. Any thread.
  virtual bool is_saving_layers() const { return false; }
  /// Returns the saves that have ended since the last call, and those whose chunk is complete in a frame
  /// (SaveDone::is_in_frame). `ok` is true if the slot is whole and every node may read it, or if is_in_frame.
  virtual std::vector<SaveDone> take_saved() = 0;
  using IsReadable = std::function<bool(ChunkRef)>;
  /// Begins to unpack chunks into blocks, after the work that the stream has so far. The blocks belong to the store
  /// until take_loaded() reports their job, in this step or a later one.
  virtual void load(std::vector<LoadJob> jobs, const IsReadable& is_readable, DeviceStream stream) = 0;
  // ---- loads of chunks that still arrive (StepPlan::ahead); the default is to unpack nothing before load() ----
  /// Takes a job without checksums. Its blocks belong to the store until the caller passes the same job to load() or
  /// drop_ahead().
  virtual void begin_ahead(const LoadJob& job) { (void)job; }
  /// Unpacks some of what has arrived of the chunks of begin_ahead()'s jobs. If bytes are unpacked before they have
  /// arrived, load() finds a wrong checksum, and unpacks the chunk once more. `is_arriving` returns true if a peer may
  /// write the chunk.
  virtual void unpack_ahead(const IsReadable& is_readable, const IsReadable& is_arriving) {
    (void)is_readable, (void)is_arriving;
  }
  virtual void drop_ahead(const LoadJob& job) { (void)job; }
  struct Loaded {
    LoadJob job;
    LoadOutcome outcome;
  };
  /// Returns the jobs that have ended since the last call. An outcome counts the tokens whose chunks are verified and
  /// in the blocks, up to the first chunk whose load failed or whose generation or checksum is wrong, because the
  /// tokens after that chunk can't be used without it. The content of the blocks from that chunk on is undefined.
  /// Whatever the outcome, the load does not overwrite what later work of the engine's stream writes to the blocks.
  virtual std::vector<Loaded> take_loaded() = 0;

  // ---- chunks from other nodes ----
  struct Place {
    RegionId region;
    std::uint64_t offset = 0;
  };
  /// Returns where a transfer may write this chunk. The caller must call landed() after the transfer. Errors: kFull if
  /// the GPU still uses the slot, or another transfer writes the slot's frame.
  virtual Result<Place> land(ChunkRef chunk, std::uint64_t bytes) = 0;
  /// Same as land(), but always returns a place in the slot. Used for a chunk that does not come from a frame. May also
  /// be called after land() for the same chunk, once the transfer into the frame has failed; the frame is then dropped.
  virtual Result<Place> land_in_slot(ChunkRef chunk, std::uint64_t bytes) { return land(chunk, bytes); }
  struct Landed {
    ChunkRef chunk;
    bool ok = false;
    std::uint64_t checksum = 0;  // chunk_checksum() of this rank's bytes, if ok
    /// Set by take_landed() alone: the chunk is in a frame and may be loaded, but is still being copied to its slot.
    /// take_landed() reports it once more when that copy has ended.
    bool is_in_frame = false;
    /// False if the caller of landed() has not verified the chunk, which is in a frame: the store compares its
    /// checksum.
    bool is_verified = true;
  };
  /// Takes chunks whose transfers have ended and no longer touch their memory, and copies the chunks in frames to their
  /// slots. The caller has verified the chunks whose `ok` and `is_verified` are true. take_landed() reports each chunk.
  virtual void landed(std::span<const Landed> chunks) = 0;
  /// Returns the landings that have ended since the last call, and those whose chunk is in a frame. `ok` is true if the
  /// slot is whole and other nodes may read it, or if is_in_frame.
  virtual std::vector<Landed> take_landed() = 0;

  // ---- frames of GPU memory that other nodes read ----
  struct Frames {
    RegionId region;
    std::uint64_t frame_bytes = 0;  // frame f begins at f * frame_bytes
  };
  /// Returns the region of the frames; nullopt if there are no frames or no transfer reaches them.
  virtual std::optional<Frames> frames() const { return std::nullopt; }
  /// Pins the frames of leased chunks until unpin_frames() or `until`; chunks that take_saved() or take_landed() has
  /// reported in a frame have one. are_growing: as in LeasedFrames::begin(). Returns for each chunk the pinned frame,
  /// or kNoFrame.
  virtual std::vector<std::uint32_t> pin_frames(std::uint64_t lease, std::span<const ChunkRef> chunks, TimeNs until,
                                                const std::vector<bool>& are_growing = {}) {
    (void)lease, (void)until, (void)are_growing;
    return std::vector<std::uint32_t>(chunks.size(), kNoFrame);
  }
  virtual void unpin_frames(std::uint64_t lease) { (void)lease; }

  /// Returns the number of slots that can't be reused yet, because work of the GPU that was reported as failed may
  /// still read or write them.
  virtual std::size_t num_fenced() const = 0;
};

/// The arguments of make_host_store() and make_gpu_store(). The memory `pool` must outlive the store.
struct ChunkStoreParts {
  std::vector<KvLayout> layouts;  // as WorkerOptions::layouts; a chunk has the bytes of each, one after the other
  std::uint32_t rank = 0;
  std::span<std::byte> pool;
  std::uint64_t chunk_bytes = 0;  // size of a slot in the pool
  RegionId pool_region;
  std::vector<ChunkFormat> formats = {};  // [layout] as WorkerOptions::formats

  ChunkFormat format_of(std::size_t layout) const { return formats.empty() ? ChunkFormat{} : formats.at(layout); }
};

/// Makes a store for blocks in host memory. Each method does all its work before it returns, and ignores its `stream`.
/// Errors: those of make_host_packer().
Result<std::unique_ptr<ChunkStore>> make_host_store(ChunkStoreParts parts);

struct GpuTier {
  Gpu gpu;
  std::uint64_t bytes = 0;        // size of all frames; 0: chunks are packed straight into the slots
  bool is_landing_place = false;  // true if transfers from other nodes may write to the frames
  TimeNs timeout = 30 * kSecond;  // time after which a save, a load or a landing counts as failed
  const Clock& clock;
  Transport& transport;  // must be shut down before the store is destroyed
};

/// Makes a store for blocks in GPU memory. Errors: those of make_joined_packer() and of the device; kInvalidArgument if
/// `tier.bytes` is not 0 but too small for one chunk.
Result<std::unique_ptr<ChunkStore>> make_gpu_store(ChunkStoreParts parts, GpuTier tier);

}  // namespace kvferry
