// Where one rank's chunks lie: in the pool's slots, which other nodes read, and perhaps in a GPU above them. Moves them
// between there and the engine's blocks, in the order of the engine's stream.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "connector/core/worker_core.h"
#include "kernels/stream_packer.h"
#include "transport/base/clock.h"
#include "transport/transport.h"

namespace kvferry {

/// Threads: any. Nothing throws and nothing is dropped: what a device refuses is a save, load or landing that failed.
class ChunkStore {
 public:
  virtual ~ChunkStore() = default;
  /// For the log: what lies above the slots; empty: nothing does.
  virtual std::string describe() const = 0;

  // ---- steps, by one thread ----
  /// Packs what the stream has computed so far; what the engine gives it later may overwrite the blocks. Each item is
  /// told once by take_saved(), in this step or a later one.
  virtual void save(const std::vector<SaveJob>& jobs, DeviceStream stream) = 0;
  /// Packs one layer of a save whose other layers follow in order, and save() after the last: what has been packed so
  /// is not packed again. Returns the chunk_checksum() of the layer's run of the slot. kUnavailable: this store packs
  /// all layers at once.
  virtual Result<std::uint64_t> save_layer(const SaveJob& job, const SaveItem& item, std::uint32_t layer) {
    (void)job, (void)item, (void)layer;
    return Error{ErrorCode::kUnavailable, "chunks are packed whole here"};
  }
  /// What has ended since the last call. ok: the slot is whole and anybody may read it.
  virtual std::vector<SaveDone> take_saved() = 0;
  using IsReadable = std::function<bool(ChunkRef)>;
  /// Unpacks; returns when the bytes are verified and in the blocks. One outcome for each job; each stops at the first
  /// chunk that is not what the plan says, since what lies behind it can't be attended. Blocks behind that are
  /// undefined.
  virtual std::vector<LoadOutcome> load(const std::vector<LoadJob>& jobs, const IsReadable& is_readable,
                                        DeviceStream stream) = 0;

  // ---- chunks that come from other nodes ----
  struct Place {
    RegionId region;
    std::uint64_t offset = 0;
  };
  /// Where a transfer may write this chunk; landed() follows. kFull: something is still at the slot.
  virtual Result<Place> land(ChunkRef chunk, std::uint64_t bytes) = 0;
  /// The same for a transfer in parts, whose checksum nobody knows before it is over: always the slot.
  virtual Result<Place> land_in_slot(ChunkRef chunk, std::uint64_t bytes) { return land(chunk, bytes); }
  struct Landed {
    ChunkRef chunk;
    bool ok = false;
    std::uint64_t checksum = 0;  // which the bytes were found to match
  };
  /// The transfers are over and their memory is quiet. Each chunk is told once by take_landed().
  virtual void landed(std::span<const Landed> chunks) = 0;
  /// As take_saved().
  virtual std::vector<Landed> take_landed() = 0;

  /// Slots that nobody may use because a device that was given up may still be at them.
  virtual std::size_t num_fenced() const = 0;
};

/// All of it outlives the store.
struct ChunkStoreParts {
  KvLayout layout;
  std::uint32_t rank = 0;
  std::span<std::byte> pool;
  std::uint64_t chunk_bytes = 0;  // of a slot
  RegionId pool_region;
};

/// Blocks and slots in host memory: all is done when a call returns, whatever the stream. Errors: make_host_packer()'s.
Result<std::unique_ptr<ChunkStore>> make_host_store(ChunkStoreParts parts);

struct GpuTier {
  Gpu gpu;
  std::uint64_t bytes = 0;  // of frames; 0: chunks are packed straight into the slots
  bool is_landing_place = false;
  TimeNs timeout = 30 * kSecond;  // then a save counts as failed, and its slot is fenced
  const Clock& clock;
  Transport& transport;  // shut down before the store goes
};

/// Blocks in GPU memory. Errors: the packer's and the device's; kInvalidArgument: `bytes` holds no chunk.
Result<std::unique_ptr<ChunkStore>> make_gpu_store(ChunkStoreParts parts, GpuTier tier);

}  // namespace kvferry
