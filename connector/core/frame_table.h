// The frames of a rank's GPU pool, which is a write-back cache above the host pool's slots. The table has each frame's
// chunk, state and pins. A clean frame without pins can be reused, because its slot has the same bytes. The scheduler
// connector plans with slots; each rank chooses the frames itself.
#pragma once

#include <cstdint>
#include <list>
#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "connector/core/plan.h"

namespace kvferry {

using FramePin = StrongId<struct FramePinTag, std::uint64_t>;

class FrameTable {
 public:
  /// One use of a frame. `use` grows with each reservation of the frame, so that a reference to an earlier use is
  /// recognized.
  struct FrameRef {
    std::uint32_t frame = 0;
    std::uint64_t use = 0;
    auto operator<=>(const FrameRef&) const = default;
  };

  enum class State : std::uint8_t {
    kFree,
    kGathering,        // KV is being packed into the frame on the model's CUDA stream
    kLanding,          // a transfer from another node writes the frame
    kFillingFromSlot,  // the chunk's slot is being copied into the frame
    kDirty,            // the frame is complete, but not copied to its slot yet
    kWritingBack,      // the frame is being copied to its slot
    kClean,            // the frame is complete, and its slot has the same bytes
    kRetired,          // the frame belongs to no chunk, and becomes free when its last pin ends
  };

  struct Frame {
    State state = State::kFree;
    std::uint64_t use = 0;
    ChunkRef chunk;
    std::uint32_t pins = 0;
    std::optional<std::uint64_t> checksum;   // chunk_checksum() of the frame's bytes, if known
    std::list<std::uint32_t>::iterator lru;  // place in lru_; valid only in state kClean
  };

  explicit FrameTable(std::uint32_t num_frames);

  struct Reserved {
    FrameRef frame;
    FramePin pin;  // prevents the reuse of the frame while the caller fills it
  };
  /// Reserves a frame that the caller fills with the chunk's bytes. If no frame is free, reuses the least recently used
  /// clean frame without pins. Returns nullopt if there is no such frame either. `purpose` is kGathering, kLanding or
  /// kFillingFromSlot. The chunk's slot must not have a frame yet.
  std::optional<Reserved> reserve(ChunkRef chunk, State purpose, std::string owner);
  /// Returns the clean frame with the bytes of this slot in exactly this generation, nullopt if there is none.
  std::optional<FrameRef> find(ChunkRef chunk) const { return find(chunk, State::kClean); }
  /// Returns the frame from which the chunk can be loaded or read by other nodes, nullopt if there is none. A clean
  /// frame is such a frame, and so is one that is being copied to its slot, once its checksum is known.
  std::optional<FrameRef> find_whole(ChunkRef chunk) const;
  /// Returns the frame that is being filled from this slot in exactly this generation, nullopt if there is none.
  std::optional<FrameRef> find_filling(ChunkRef chunk) const { return find(chunk, State::kFillingFromSlot); }
  /// Returns the frame into which a save packs the chunk, whose end is not known yet; nullopt if there is none.
  std::optional<FrameRef> find_growing(ChunkRef chunk) const;
  const Frame& frame(FrameRef ref) const;

  /// Prevents the reuse of the frame until unpin().
  FramePin pin(FrameRef ref, std::string owner);
  void unpin(FramePin pin);

  // The next four functions return false if the frame no longer belongs to the chunk. The first three change the
  // frame's state. After a gather or a landing the caller calls these three, in this order, unless a copy fails; after
  // a fill from the slot, the caller calls only the first of the three.
  /// Records that the frame has all its bytes: kGathering or kLanding -> kDirty; kFillingFromSlot -> kClean.
  bool filled(FrameRef ref);
  bool write_back_started(FrameRef ref);
  bool written_back(FrameRef ref);
  /// Stores the checksum of the frame's bytes, at any time after filled().
  bool hashed(FrameRef ref, std::uint64_t checksum);

  /// Marks the frame as just used.
  void touch(FrameRef ref);
  /// Separates the frame of this slot, if there is one, from its chunk. Must be called before the slot gets other
  /// bytes. The frame becomes free once it has no pins.
  void drop_slot(std::uint32_t slot);
  /// Separates a frame whose bytes are invalid from its chunk.
  void drop(FrameRef ref);

  std::uint32_t num_frames() const { return static_cast<std::uint32_t>(frames_.size()); }
  struct Pin {
    FrameRef frame;
    std::string owner;
  };
  /// Returns all pins, keyed by FramePin::value.
  const std::map<std::uint64_t, Pin>& pins() const { return pins_; }

 private:
  std::optional<FrameRef> find(ChunkRef chunk, State state) const;
  Frame* current(FrameRef ref);
  bool advance(FrameRef ref, State from, State to);
  void make_clean(std::uint32_t index);
  void retire(std::uint32_t index);

  std::vector<Frame> frames_;
  std::vector<std::uint32_t> free_;
  std::list<std::uint32_t> lru_;  // clean frames, least recently used first
  std::unordered_map<std::uint32_t, std::uint32_t> by_slot_;
  std::map<std::uint64_t, Pin> pins_;
  std::uint64_t last_pin_ = 0;
};

}  // namespace kvferry
