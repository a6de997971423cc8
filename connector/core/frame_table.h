// Which chunk lies in which frame of GPU memory, and what still reads or writes it. The frames lie above the pool's
// slots and the scheduler does not know of them: a frame may go whenever nobody is at it, the slot has the bytes.
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
  /// One use of a frame, from its claim on. `use` grows with each: what is said of an older one has no effect.
  struct FrameRef {
    std::uint32_t frame = 0;
    std::uint64_t use = 0;
    auto operator<=>(const FrameRef&) const = default;
  };

  enum class State : std::uint8_t {
    kFree,
    kGathering,    // the model's stream writes it
    kLanding,      // a transfer writes it
    kFillingFromSlot,   // it is copied here from its slot
    kDirty,  // whole; the slot lacks it
    kWritingBack,  // on its way to the slot
    kClean,        // whole, and the slot has the same bytes
    kRetired,       // no chunk claims it any more; free when the last pin goes
  };

  struct Frame {
    State state = State::kFree;
    std::uint64_t use = 0;
    ChunkRef chunk;
    std::uint32_t pins = 0;
    std::optional<std::uint64_t> checksum;   // of what lies here, where it was taken
    std::list<std::uint32_t>::iterator lru;  // valid in kClean
  };

  explicit FrameTable(std::uint32_t num_frames);

  struct Claim {
    FrameRef frame;
    FramePin pin;  // of who fills it
  };
  /// A frame to fill with the chunk's bytes; `purpose`: kGathering, kLanding or kFillingFromSlot. A free one, else the least
  /// recently used clean one without a pin. nullopt: there is none. The slot must not have one.
  std::optional<Claim> claim(ChunkRef chunk, State purpose, std::string owner);
  /// The frame with exactly this generation of the slot, clean: it may be read.
  std::optional<FrameRef> find(ChunkRef chunk) const;
  const Frame& frame(FrameRef ref) const;

  /// Keeps the frame's bytes until unpin().
  FramePin pin(FrameRef ref, std::string owner);
  void unpin(FramePin pin);

  // What happened to the bytes, in this order. False: too late, the chunk has let go of the frame.
  /// kGathering, kLanding -> kDirty; kFillingFromSlot -> kClean.
  bool filled(FrameRef ref);
  bool write_back_started(FrameRef ref);
  bool written_back(FrameRef ref);
  /// The checksum of what lies there.
  bool hashed(FrameRef ref, std::uint64_t checksum);

  /// Just used.
  void touch(FrameRef ref);
  /// The slot gets other bytes, or the frame's are no good: no look-up finds it. Free once nobody has pinned it.
  void drop_slot(std::uint32_t slot);
  void drop(FrameRef ref);

  std::uint32_t num_frames() const { return static_cast<std::uint32_t>(frames_.size()); }
  std::uint32_t num_free() const { return static_cast<std::uint32_t>(free_.size()); }
  std::uint32_t num_clean() const { return static_cast<std::uint32_t>(lru_.size()); }
  struct Pin {
    FrameRef frame;
    std::string owner;
  };
  /// All pins, by number.
  const std::map<std::uint64_t, Pin>& pins() const { return pins_; }

 private:
  Frame* current(FrameRef ref);
  bool advance(FrameRef ref, State from, State to);
  void make_clean(std::uint32_t index);
  void let_go(std::uint32_t index);

  std::vector<Frame> frames_;
  std::vector<std::uint32_t> free_;
  std::list<std::uint32_t> lru_;  // clean frames, least recently used first
  std::unordered_map<std::uint32_t, std::uint32_t> by_slot_;
  std::map<std::uint64_t, Pin> pins_;
  std::uint64_t last_pin_ = 0;
};

}  // namespace kvferry
